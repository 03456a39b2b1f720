/**
 * Whether mounts of this process's namespace have come or gone since the last look. The kernel says so by an exceptional condition on
 * its mount table, so whoever keeps what he has read need not read it again: the table grows with every mount of the machine.
 */
import { closeSync, openSync } from 'node:fs';
import { type Call, call } from './libc.ts';

const POLL: Call = { name: 'poll', result: 'int', args: ['void*', 'ulong', 'int'] };
const PRI = 2;

export class MountWatch {
  private readonly fd = openSync('/proc/self/mountinfo', 'r');
  private readonly ask = Buffer.alloc(8);

  /** Since this was asked the last time; since the watch was made, at first. */
  changed(): boolean {
    this.ask.writeInt32LE(this.fd, 0);
    this.ask.writeUInt16LE(PRI, 4);
    this.ask.writeUInt16LE(0, 6);
    return call(POLL, [this.ask, 1, 0], '/proc/self/mountinfo') > 0;
  }

  close(): void {
    closeSync(this.fd);
  }
}
