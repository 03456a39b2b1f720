/** What both ends of a forwarded port have in common. */
import type { Duplex } from 'node:stream';

/** What a request is upgraded to: from then on bytes, both ways. */
export const TCP_PROTOCOL = 'dsec-tcp';

/** Each way ends by itself. What breaks one end breaks the other, but not before that has given on what it was told. */
export function join(one: Duplex, other: Duplex): void {
  for (const [from, to] of [
    [one, other],
    [other, one],
  ] as const) {
    from.pipe(to);
    from.once('error', () => {});
    from.once('close', () => {
      if (!from.readableEnded) to.destroy();
      // Nobody takes what it still says.
      else if (!to.readableEnded) destroyWritten(to);
    });
  }
}

function destroyWritten(stream: Duplex): void {
  if (stream.writableFinished || !stream.writableEnded) stream.destroy();
  else stream.once('finish', () => stream.destroy());
}
