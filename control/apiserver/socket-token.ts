/**
 * The token of a WebSocket that a page opens: a browser lets it set no header but the protocols that it offers. So one of those may be the token,
 * `dsec.token.` and its bytes in base64url. It goes no further than here: what listens at the other end sees the other protocols.
 */
import type { IncomingMessage } from 'node:http';

const HEADER = 'sec-websocket-protocol';
const PREFIX = 'dsec.token.';

/** Takes it out of the request: into `authorization`, where none is given. */
export function takeSocketToken({ headers, rawHeaders }: IncomingMessage): void {
  const offered = (headers[HEADER] ?? '')
    .split(',')
    .map((name) => name.trim())
    .filter((name) => name !== '');
  const tokens = offered.filter((name) => name.startsWith(PREFIX));
  if (tokens.length === 0) return;
  const others = offered.filter((name) => !name.startsWith(PREFIX)).join(', ');
  if (others === '') delete headers[HEADER];
  else headers[HEADER] = others;
  // Nobody reads them here; whoever does some day is not to find it.
  for (let at = 0; at < rawHeaders.length; at += 2) {
    if (rawHeaders[at]!.toLowerCase() === HEADER) rawHeaders[at + 1] = others;
  }
  headers.authorization ??= `Bearer ${Buffer.from(tokens[0]!.slice(PREFIX.length), 'base64url').toString('latin1')}`;
}
