/** A service as sandboxes talk to: for each byte that comes some milliseconds of work, then a byte back. On the socket that it is told. */
import { createHash } from 'node:crypto';
import { createServer } from 'node:net';

const input = Buffer.alloc(1 << 20, 'request');
createServer((socket) => {
  socket.on('error', () => {});
  socket.on('data', (asked) => {
    // Several may come at once.
    for (let i = 0; i < asked.length; i++) {
      createHash('sha256').update(input).digest();
      socket.write('.');
    }
  });
}).listen(process.argv[2], () => console.log('ready'));
