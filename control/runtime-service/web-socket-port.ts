/**
 * Bytes of a port as binary messages of a WebSocket: a page of a browser has no other way to a connection (the console's screen speaks VNC over it). What
 * is sent as text is taken as its bytes. Whichever end goes takes the other with it.
 */
import type { IncomingMessage } from 'node:http';
import type { Duplex } from 'node:stream';
import { createWebSocketStream, WebSocketServer } from 'ws';
import { join } from './port-streams.ts';

export const WEBSOCKET = 'websocket';
const MOST_MESSAGE_BYTES = 16 << 20;
/** What pages offer for bytes; of others none is chosen. */
const PROTOCOL = 'binary';

const server = new WebSocketServer({
  noServer: true,
  maxPayload: MOST_MESSAGE_BYTES,
  perMessageDeflate: false,
  handleProtocols: (offered) => (offered.has(PROTOCOL) ? PROTOCOL : false),
});

/** A request that is no WebSocket's is answered by the library, and the connection ends. */
export function joinWebSocket(request: IncomingMessage, socket: Duplex, head: Buffer, connection: Duplex): void {
  socket.once('close', () => connection.destroy());
  server.handleUpgrade(request, socket, head, (opened) => join(createWebSocketStream(opened), connection));
}
