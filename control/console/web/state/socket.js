/**
 * A WebSocket of the API as this session: its token goes as one of the protocols that are offered, since a page can send no header with it. The server
 * takes it out; it is in no address.
 */

/** @param {import('../api/client.js').ApiClient} api @param {string} where `/v1/...` @returns {WebSocket} */
export function openSocket({ base, token }, where) {
  const url = new URL(where.slice(1), base);
  url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
  const socket = new WebSocket(url, ['binary', `dsec.token.${base64url(token)}`]);
  socket.binaryType = 'arraybuffer';
  return socket;
}

/** @param {string} text */
function base64url(text) {
  return btoa(text).replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '');
}
