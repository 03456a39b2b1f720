/**
 * Pipes to a child's standard streams, as real pipes. What Node's `stdio: 'pipe'` makes are sockets, and a program in a
 * container that opens /dev/stdout or /dev/stderr (shells do, for `> /dev/stderr`) fails on those. Open to any user: a
 * sandbox's user may open its own /dev/stdout again, and nobody else can name these.
 */
import { closeSync, fchmodSync } from 'node:fs';
import { Socket } from 'node:net';
import { makePipe } from '#linux';

export interface StdioPipes {
  readonly stdin: Socket;
  readonly stdout: Socket;
  readonly stderr: Socket;
  /** The child's ends, for `stdio` of spawn. */
  readonly childFds: readonly [number, number, number];
  /** After spawn: the child holds its own. */
  closeChildEnds(): void;
}

export function makeStdioPipes(): StdioPipes {
  const [stdin, stdout, stderr] = [openPipe(), openPipe(), openPipe()];
  const childFds = [stdin.readFd, stdout.writeFd, stderr.writeFd] as const;
  return {
    stdin: new Socket({ fd: stdin.writeFd, readable: false, writable: true }),
    stdout: new Socket({ fd: stdout.readFd, readable: true, writable: false }),
    stderr: new Socket({ fd: stderr.readFd, readable: true, writable: false }),
    childFds,
    closeChildEnds() {
      for (const fd of childFds) closeSync(fd);
    },
  };
}

function openPipe() {
  const pipe = makePipe();
  fchmodSync(pipe.readFd, 0o666);
  return pipe;
}
