/**
 * A disk as one file: a FUSE file system whose root is that file, mounted on PATH; and a loop device over it where one is wanted. For
 * hosts that have neither ublk nor an NBD client.
 *
 * Requests are taken by this thread, all that are there at once: while it is at work it asks the device itself, in between it
 * lets another thread sleep on it (device-watch.ts). A thread that took them would have to hand each of them over.
 *
 * This process must never wait for the file or the device itself. What may wait for them, down to unmounting and closing, is done by another
 * process (device-process.ts); and this one never has them open, so that its end waits for nothing: when it is killed, the kernel closes
 * /dev/fuse, the last of its copies, and whoever waits gets an error (ENOTCONN at the file, EIO at the loop device). With `hold` another
 * process has a copy (fuse-holder.ts): then they wait until `resumeFile` sends their requests to the next server. That is safe for the reason
 * that it is with ublk: what was not answered may be done twice.
 */
import { closeSync, writeFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { messageOf, systemCode } from '#base';
import { becomeIoFlusher, detachLoop, fuse, MS, mountsAt, umount } from '#linux';
import { fail } from '../../errors.ts';
import type { BlockTarget } from '../block-target.ts';
import { carryOut } from './device-order.ts';
import { DeviceWatch } from './device-watch.ts';
import { FileRequests, MAX_TRANSFER_BYTES } from './file-requests.ts';
import { endHolders, findHolders, holdDevice, takeFromHolder } from './fuse-holder.ts';
import { isOurs, leaveMountPlace, loopsOf, type MountPlace, prepareMountPlace, SOURCE_PREFIX } from './mount-place.ts';

export interface FileServerOptions {
  readonly target: BlockTarget;
  /** A file that is not there, or an empty one. */
  readonly path: string;
  /** Refuse writes; those of a read-only target always are. */
  readonly readOnly?: boolean;
  /** Any user who reaches the path may open it; else its owner alone, who is root. */
  readonly shared?: boolean;
  /** Make a loop device over it. */
  readonly loop?: boolean;
  /** The mount outlives this process, and waits for `resumeFile`. Where the kernel can send requests again (Linux 6.9). */
  readonly hold?: boolean;
  /** What the mount table shows behind `dsec-disk-`: by which a server knows its own after a crash. */
  readonly mark?: string;
}

export interface FileServer {
  /** The file, absolute. */
  readonly path: string;
  /** `/dev/loopN` */
  readonly loop: string | undefined;
  /** Rejects when somebody else has unmounted it, or serving has failed. */
  readonly failed: Promise<never>;
  /**
   * Frees the loop device and unmounts. Who still has them open `graceMs` (5 s) later gets errors from then on. The target is not touched
   * afterwards. Twice is no error.
   */
  stop(graceMs?: number): Promise<void>;
  /** Ends serving as if this process had died: who asks waits for `resumeFile`. Undefined: nobody holds the mount. */
  readonly leave: (() => Promise<void>) | undefined;
}

const GRACE_MS = 5000;
/** Requests before others of this thread have their turn. */
const MOST_A_TURN = 64;
/** What may wait for the target at once; the kernel keeps the rest. */
const MOST_HELD_BYTES = 64 * 2 ** 20;
/** How long the device is asked again and again after the last request: sleeping and waking takes as long. */
const LINGER_MS = 0.1;
const READ_AHEAD_KIB = 1024;

/** @throws FILE_PATH, FILE_TAKEN, FILE_UNAVAILABLE, FILE_DEVICE */
export async function serveFile(options: FileServerOptions): Promise<FileServer> {
  const { target, mark = String(process.pid) } = options;
  const readOnly = options.readOnly === true || target.readOnly;
  becomeIoFlusher();
  const place = await prepareMountPlace(options.path);
  let connection: fuse.FuseConnection;
  try {
    connection = fuse.connectFuse(place.path, `${SOURCE_PREFIX}-${mark}`, {
      initFlags: () => ({ flags: 0, flags2: 0 }),
      mountFlags: MS.NOSUID | MS.NODEV | MS.NOEXEC | (readOnly ? MS.RDONLY : 0),
      file: true,
      maxWriteBytes: MAX_TRANSFER_BYTES,
      nonBlocking: true,
    });
  } catch (error) {
    leaveMountPlace(place);
    throw fail('FILE_UNAVAILABLE', { reason: messageOf(error) }, error);
  }
  const serving = new Serving(target, place, connection.fd, { readOnly, shared: options.shared === true });
  try {
    setReadAhead(connection.device, READ_AHEAD_KIB);
    if (options.hold && connection.agreed.canResend) await serving.hold();
    if (options.loop) await serving.makeLoop();
    return serving;
  } catch (error) {
    await serving.stop(0);
    throw error;
  }
}

/**
 * Takes over from a server that is gone, all its threads with it: same file, same loop device. The target has to be the same disk.
 * Undefined: nobody has held it.
 */
export async function resumeFile(options: FileServerOptions): Promise<FileServer | undefined> {
  const { target, path } = options;
  const row = mountsAt(path).at(-1);
  const holder = findHolders(path).at(0);
  if (row === undefined || holder === undefined || !isOurs(row)) return undefined;
  becomeIoFlusher();
  const fd = takeFromHolder(holder);
  try {
    fuse.resend(fd);
  } catch {
    // Unmounted meanwhile.
    closeSync(fd);
    return undefined;
  }
  const access = { readOnly: options.readOnly === true || target.readOnly, shared: options.shared === true };
  const serving = new Serving(target, { path, made: true }, fd, access);
  serving.held = true;
  try {
    const [loop] = loopsOf(path);
    if (options.loop && loop === undefined) await serving.makeLoop();
    else serving.loop = loop;
    return serving;
  } catch (error) {
    await serving.stop(0);
    throw error;
  }
}

class Serving implements FileServer {
  readonly failed: Promise<never>;
  loop: string | undefined;
  held = false;
  readonly #place: MountPlace;
  readonly #fd: number;
  readonly #target: BlockTarget;
  readonly #readOnly: boolean;
  readonly #requests: FileRequests;
  readonly #watch: DeviceWatch;
  readonly #ended: Promise<void>;
  #setEnded: () => void = () => {};
  #isEnded = false;
  #idle: (() => void) | undefined;
  #lastMs = 0;
  /** Nothing is taken until something has been answered. */
  #full = false;
  #stopped: Promise<void> | undefined;
  #reject: (error: unknown) => void = () => {};

  constructor(
    target: BlockTarget,
    place: MountPlace,
    fd: number,
    access: { readonly readOnly: boolean; readonly shared: boolean },
  ) {
    this.#target = target;
    this.#readOnly = access.readOnly;
    this.#place = place;
    this.#fd = fd;
    this.failed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    // Whoever does not wait for it must not fall over it.
    this.failed.catch(() => {});
    this.#ended = new Promise((resolve) => {
      this.#setEnded = resolve;
    });
    this.#requests = new FileRequests(fd, target, access, () => this.#answered());
    this.#watch = new DeviceWatch(fd, () => this.#serve());
    this.#watch.arm();
  }

  get path(): string {
    return this.#place.path;
  }

  async makeLoop(): Promise<void> {
    const { blockSize } = this.#target;
    this.loop = await carryOut({ do: 'attach-loop', path: this.path, readOnly: this.#readOnly, blockSize });
  }

  async hold(): Promise<void> {
    await holdDevice(this.#fd, this.path);
    this.held = true;
  }

  get leave(): (() => Promise<void>) | undefined {
    return this.held ? () => this.#leave() : undefined;
  }

  async #leave(): Promise<void> {
    // What the target still answers is not told: the next server is asked again.
    this.#stopped ??= Promise.resolve();
    this.#end();
  }

  /** Takes what is there. */
  #serve(): void {
    if (this.#isEnded) return;
    try {
      for (let taken = 0; taken < MOST_A_TURN; taken++) {
        if (this.#requests.heldBytes >= MOST_HELD_BYTES) {
          this.#full = true;
          return;
        }
        const lengthBytes = fuse.readRequestNow(this.#fd, this.#requests.request);
        if (lengthBytes === fuse.GONE) {
          this.#end();
          return;
        }
        if (lengthBytes === fuse.NONE) {
          this.#rest(taken > 0);
          return;
        }
        this.#requests.take();
      }
      setImmediate(() => this.#serve());
    } catch (error) {
      this.#reject(error);
      this.#end();
    }
  }

  #rest(served: boolean): void {
    const nowMs = performance.now();
    if (served) this.#lastMs = nowMs;
    if (nowMs - this.#lastMs < LINGER_MS) setImmediate(() => this.#serve());
    else this.#watch.arm();
  }

  #answered(): void {
    if (this.#requests.waiting === 0) this.#idle?.();
    if (!this.#full || this.#isEnded) return;
    this.#full = false;
    this.#serve();
  }

  /** Unmounted, or given up: nobody asks any more, and nobody who waits is answered. */
  #end(): void {
    if (this.#isEnded) return;
    this.#isEnded = true;
    this.#requests.end();
    this.#watch.end();
    closeSync(this.#fd);
    this.#setEnded();
    if (this.#stopped === undefined) {
      this.#reject(fail('FILE_DEVICE', { path: this.path, what: 'serve it any longer', reason: 'it was unmounted' }));
    }
  }

  stop(graceMs = GRACE_MS): Promise<void> {
    this.#stopped ??= this.#stop(graceMs);
    return this.#stopped;
  }

  async #stop(graceMs: number): Promise<void> {
    // The time is its users', not the machine's.
    await this.#order({ do: 'start', path: this.path }).catch(() => {});
    const untilMs = performance.now() + graceMs;
    const late = () => performance.now() >= untilMs;
    try {
      // Of one that is in use the kernel says yes, and frees it after its last user.
      for (const loop of loopsOf(this.path)) await within(untilMs, this.#order({ do: 'detach-loop', path: loop }));
      while (!this.#isEnded && (await within(untilMs, this.#unmount())) !== 'done') {
        if (late()) break;
        await delay(50);
      }
      if (!this.#isEnded && !late()) await within(untilMs, this.#ended);
    } finally {
      // Its users have had their time. Without a server and a holder the kernel answers them, and unmounting waits for nobody.
      if (this.held) await endHolders(this.path);
      this.#end();
      this.#freeDead();
      await within(untilMs, this.#whenIdle());
      leaveMountPlace(this.#place);
    }
  }

  async #unmount(): Promise<'done' | undefined> {
    return (await this.#order({ do: 'unmount', path: this.path, lazy: false })) === undefined ? undefined : 'done';
  }

  #freeDead(): void {
    for (const loop of loopsOf(this.path)) {
      try {
        detachLoop(loop);
      } catch (error) {
        if (!['ENXIO', 'ENOENT'].includes(systemCode(error) ?? '')) throw error;
      }
    }
    const row = mountsAt(this.path).at(-1);
    if (row === undefined || !isOurs(row)) return;
    try {
      umount(this.path, { lazy: true });
    } catch (error) {
      if (systemCode(error) !== 'EINVAL') throw error;
    }
  }

  #order(order: Parameters<typeof carryOut>[0]): Promise<string | undefined> {
    return carryOut(order, ['EBUSY', 'EINVAL', 'ENXIO', 'ENOENT']);
  }

  #whenIdle(): Promise<void> {
    if (this.#requests.waiting === 0) return Promise.resolve();
    return new Promise((idle) => {
      this.#idle = idle;
    });
  }
}

/** What `work` gives, or undefined when it takes longer. */
async function within<T>(untilMs: number, work: Promise<T>): Promise<T | undefined> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<undefined>((done) => {
    timer = setTimeout(() => done(undefined), Math.max(0, untilMs - performance.now()));
  });
  try {
    return await Promise.race([work, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** Sequential readers get the largest requests. Best effort: a container may show /sys read-only. */
function setReadAhead(device: string, kib: number): void {
  try {
    writeFileSync(`/sys/class/bdi/${device}/read_ahead_kb`, String(kib));
  } catch {
    // Then reads are smaller.
  }
}
