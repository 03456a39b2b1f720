// A network link on loopback: TCP from a port of its own to a server, what comes back limited in bytes a second for all connections
// together, and late by a round trip. A program of its own, so that nothing else that a process does holds it up.
//
// Argument: JSON { target: 'host:port', bytesPerSecond, latencyMs }. Prints its port. On stdin, `stats` prints the bytes so far.
import { connect, createServer } from 'node:net';
import { createInterface } from 'node:readline';

/** @type {{ target: string, bytesPerSecond: number, latencyMs: number }} */
const { target, bytesPerSecond, latencyMs } = JSON.parse(/** @type {string} */ (process.argv[2]));
const [host, port] = /** @type {[string, string]} */ (target.split(':'));
/** What one connection may have on the link: what is under way, and little more, which would only wait in here out of turn. */
const QUEUED_BYTES = 128 * 1024 + (bytesPerSecond * latencyMs) / 1000;
/** Timers do not go finer. */
const TIMER_MS = 1;

let bytes = 0;
/** When the link has sent all that it was given. */
let freeAtMs = 0;
/** In the order of their leaving: times only grow. @type {{ atMs: number, deliver: () => void }[]} */
let queue = [];
let waiting = false;

/** @param {number} sizeBytes @param {() => void} deliver */
function send(sizeBytes, deliver) {
  bytes += sizeBytes;
  freeAtMs = Math.max(freeAtMs, performance.now()) + (sizeBytes / bytesPerSecond) * 1000;
  queue.push({ atMs: freeAtMs + latencyMs, deliver });
  flushLater();
}

function flushLater() {
  const [next] = queue;
  if (waiting || next === undefined) return;
  waiting = true;
  setTimeout(flush, Math.max(0, next.atMs - performance.now()));
}

function flush() {
  waiting = false;
  const now = performance.now() + TIMER_MS / 2;
  const due = queue.findIndex(({ atMs }) => atMs > now);
  const leaving = queue.slice(0, due === -1 ? queue.length : due);
  queue = queue.slice(leaving.length);
  for (const { deliver } of leaving) deliver();
  flushLater();
}

const server = createServer({ allowHalfOpen: true, noDelay: true }, (client) => {
  const remote = connect({ host, port: Number(port), allowHalfOpen: true, noDelay: true });
  let queued = 0;
  client.pipe(remote);
  remote.on('data', (piece) => {
    queued += piece.length;
    if (queued >= QUEUED_BYTES) remote.pause();
    send(piece.length, () => {
      queued -= piece.length;
      if (!client.destroyed) client.write(piece);
      if (queued < QUEUED_BYTES && !client.writableNeedDrain) remote.resume();
    });
  });
  client.on('drain', () => {
    if (queued < QUEUED_BYTES) remote.resume();
  });
  remote.on('end', () => send(0, () => client.end()));
  const end = () => {
    client.destroy();
    remote.destroy();
  };
  client.on('error', end).on('close', end);
  remote.on('error', end);
});
server.listen(0, '127.0.0.1', () => {
  const address = /** @type {import('node:net').AddressInfo} */ (server.address());
  console.log(address.port);
});
createInterface({ input: process.stdin })
  .on('line', () => console.log(bytes))
  .on('close', () => process.exit(0));
