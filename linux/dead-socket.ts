/** A socket file that a dead process left: connecting to any other kind of file is refused in the same way. */
import { lstatSync } from 'node:fs';
import { connect } from 'node:net';
import { systemCode } from '#base';

/** Whether `path` is a socket file that nobody answers on, and may be replaced. */
export async function isDeadSocket(path: string): Promise<boolean> {
  if (lstatSync(path, { throwIfNoEntry: false })?.isSocket() !== true) return false;
  return new Promise((done) => {
    const socket = connect(path);
    socket.once('connect', () => {
      socket.destroy();
      done(false);
    });
    socket.once('error', (error) => done(systemCode(error) === 'ECONNREFUSED'));
  });
}
