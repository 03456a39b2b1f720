/** How one comes to the agent of a machine, whatever socket leads to it: a stream that may end at any time; then whoever had it opens another one. */
import { connect } from 'node:net';
import type { Duplex } from 'node:stream';

/** Fails where nobody is there yet, or any more. */
export type OpenChannel = () => Promise<Duplex>;

/** A unix socket that the machine listens on. */
export function socketChannel(path: string): OpenChannel {
  return () =>
    new Promise((resolve, reject) => {
      const socket = connect({ path });
      socket.once('error', reject);
      socket.once('connect', () => {
        socket.off('error', reject);
        resolve(socket);
      });
    });
}
