/**
 * Our own standard streams for a sandbox of an OCI runtime. crun and runc give what they are handed to the sandbox's user, so that a program in
 * there may open /dev/stdout: a file or terminal is given back when the sandbox has ended, and /dev/null, which is everybody's,
 * is never handed out at all, but one of our own.
 */
import { closeSync, constants, fchownSync, fstatSync, openSync } from 'node:fs';
import { createMount, makeDevice, mknod, S_IFCHR } from '#linux';

const NULL_DEVICE = makeDevice(1, 3);

export interface LentStdio {
  /** For `spawn`. */
  readonly fds: readonly number[];
  /** When it is spawned: it has copies. */
  closeOwn(): void;
  /** The sandbox has ended. */
  giveBack(): void;
}

export function lendStdio(): LentStdio {
  const files = [0, 1, 2].map((fd) => fstatSync(fd));
  let own: number | undefined;
  const fds = files.map((file, fd) => {
    if (!file.isCharacterDevice() || file.rdev !== NULL_DEVICE) return fd;
    try {
      own ??= openOwnNull();
    } catch {
      // A kernel before 5.2. It is lent and given back then.
      return fd;
    }
    return own;
  });
  return {
    fds,
    closeOwn() {
      if (own !== undefined) closeSync(own);
      own = undefined;
    },
    giveBack() {
      for (const [fd, { uid, gid }] of files.entries()) {
        if (fds[fd] !== fd) continue;
        try {
          const now = fstatSync(fd);
          if (now.uid !== uid || now.gid !== gid) fchownSync(fd, uid, gid);
        } catch {
          // Closed meanwhile, or of a file system that knows no owners.
        }
      }
    },
  };
}

/** A null device in a file system that is nowhere, and gone with the last descriptor of it. */
function openOwnNull(): number {
  const { fd } = createMount('tmpfs', [['size', '4k']]);
  try {
    const path = `/proc/self/fd/${fd}/null`;
    mknod(path, S_IFCHR | 0o666, 1, 3);
    return openSync(path, constants.O_RDWR);
  } finally {
    closeSync(fd);
  }
}
