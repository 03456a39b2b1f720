/**
 * Pipes to a child's standard streams, as real pipes. What Node's `stdio: 'pipe'` makes are sockets, and a program in a
 * container that opens /dev/stdout or /dev/stderr (shells do, for `> /dev/stderr`) fails on those. Named pipes, unlinked
 * as soon as both ends are open; open to any user, as a sandbox's user may open its own /dev/stdout again.
 */
import { closeSync, constants, openSync, unlinkSync } from 'node:fs';
import { Socket } from 'node:net';
import { join } from 'node:path';
import { fromText } from '#base';
import { mkfifo } from '#linux';

const { O_RDONLY, O_WRONLY, O_NONBLOCK } = constants;

export interface StdioPipes {
  readonly stdin: Socket;
  readonly stdout: Socket;
  readonly stderr: Socket;
  /** The child's ends, for `stdio` of spawn. */
  readonly childFds: readonly [number, number, number];
  /** After spawn: the child holds its own. */
  closeChildEnds(): void;
}

export function makeStdioPipes(folder: string): StdioPipes {
  const stdin = makePipe(join(folder, 'stdin'), 'to-child');
  const stdout = makePipe(join(folder, 'stdout'), 'from-child');
  const stderr = makePipe(join(folder, 'stderr'), 'from-child');
  const childFds = [stdin.child, stdout.child, stderr.child] as const;
  return {
    stdin: new Socket({ fd: stdin.own, readable: false, writable: true }),
    stdout: new Socket({ fd: stdout.own, readable: true, writable: false }),
    stderr: new Socket({ fd: stderr.own, readable: true, writable: false }),
    childFds,
    closeChildEnds() {
      for (const fd of childFds) closeSync(fd);
    },
  };
}

function makePipe(path: string, direction: 'to-child' | 'from-child'): { own: number; child: number } {
  mkfifo(fromText(path), 0o666);
  try {
    if (direction === 'from-child') {
      const own = openSync(path, O_RDONLY | O_NONBLOCK);
      return { own, child: openSync(path, O_WRONLY) };
    }
    // The write end opens only when a reader is there, and the child's end must block: so first a reader to throw away.
    const opener = openSync(path, O_RDONLY | O_NONBLOCK);
    const own = openSync(path, O_WRONLY | O_NONBLOCK);
    const child = openSync(path, O_RDONLY);
    closeSync(opener);
    return { own, child };
  } finally {
    unlinkSync(path);
  }
}
