/** Server-sent events out of a stream of bytes: EventSource cannot send the header that authenticates. No DOM here. */

/** @typedef {{ event: string, data: string, id: string | undefined }} ServerEvent */

const MOST_CHARACTERS = 16 << 20;

/** @param {AsyncIterable<Uint8Array>} stream @returns {AsyncGenerator<ServerEvent>} */
export async function* parseEvents(stream) {
  const decoder = new TextDecoder();
  let rest = '';
  /** @type {ServerEvent & { any: boolean }} */
  let current = { event: 'message', data: '', id: undefined, any: false };
  for await (const bytes of stream) {
    rest += decoder.decode(bytes, { stream: true });
    if (rest.length > MOST_CHARACTERS) throw new Error('an event without an end');
    // A \r at the very end may be the first half of \r\n.
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    rest = /** @type {string} */ (lines.pop());
    for (const line of lines) {
      if (line !== '') {
        take(current, line);
        continue;
      }
      const { event, data, id, any } = current;
      current = { event: 'message', data: '', id: undefined, any: false };
      if (any) yield { event, data, id };
    }
  }
}

/** @param {ServerEvent & { any: boolean }} current @param {string} line */
function take(current, line) {
  const colon = line.indexOf(':');
  if (colon === 0) return;
  const field = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
  if (field === 'event') current.event = value;
  else if (field === 'id') current.id = value;
  else if (field === 'data') {
    current.data = current.any ? `${current.data}\n${value}` : value;
    current.any = true;
  }
}
