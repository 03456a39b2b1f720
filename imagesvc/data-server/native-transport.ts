/**
 * The portable transport: fuse-native over libfuse 2 (apt: libfuse2), loaded only when it is asked for. It works where
 * mount(2) is forbidden but fusermount is there. Every request passes through the main thread, reads have at most 128 KiB,
 * and when this process dies its mount is dead: no resend.
 *
 * libfuse speaks in paths, so the list of blobs is looked up by name; otherwise it shows what BlobFilesSystem shows.
 */
import { createRequire } from 'node:module';
import { hexOf, messageOf, systemCode } from '#base';
import { fuse, umount } from '#linux';
import { fail } from '../errors.ts';
import { BlobFilesSystem } from './blob-files-system.ts';
import { type BlobView, openView } from './blob-view.ts';
import type { BlobReader, ServedBlob } from './served-blob.ts';
import type { Transport, TransportOptions, TransportStats } from './transport.ts';

const { ERRNO } = fuse;

type Answer<T> = (error: number, value?: T) => void;

interface NativeStat {
  mtime: Date;
  atime: Date;
  ctime: Date;
  nlink: number;
  size: number;
  blocks: number;
  mode: number;
  ino: number;
  uid: number;
  gid: number;
}

interface Operations {
  readdir(path: string, done: Answer<string[]>): void;
  getattr(path: string, done: Answer<NativeStat>): void;
  open(path: string, flags: number, done: Answer<number>): void;
  release(path: string, handle: number, done: Answer<undefined>): void;
  read(
    path: string,
    handle: number,
    into: Buffer,
    length: number,
    offset: number,
    done: (result: number) => void,
  ): void;
}

interface NativeFuse {
  mount(done: (error?: Error) => void): void;
  unmount(done: (error?: Error) => void): void;
}

interface FuseClass {
  new (mountPoint: string, operations: Operations, options: Record<string, unknown>): NativeFuse;
  unmount(mountPoint: string, done: (error?: unknown) => void): void;
}

export interface NativeTransport extends Transport {
  unmount(): Promise<void>;
}

/** How long libfuse waits for a fetch before it answers with an error in its place. */
const FETCH_TIMEOUT_MS = 10 * 60_000;

/** @throws DATA_FUSE_UNAVAILABLE when fuse-native or libfuse does not load, or the mount is refused */
export async function serveNative(options: TransportOptions & { mountPoint: string }): Promise<NativeTransport> {
  const Fuse = loadFuse();
  const served = new NativeServed(options);
  const fuse = new Fuse(options.mountPoint, served.operations(), {
    timeout: FETCH_TIMEOUT_MS,
    autoUnmount: false,
    defaultPermissions: true,
    kernelCache: true,
    maxRead: 128 * 1024,
    ...(process.geteuid?.() === 0 ? { allowOther: true } : {}),
  });
  await settle((done) => fuse.mount(done));
  let end = () => {};
  const ended = new Promise<void>((resolve) => {
    end = resolve;
  });
  return {
    kind: 'native',
    ended,
    add: (blob) => served.add(blob),
    stats: () => served.stats(),
    async unmount() {
      await settle((done) => fuse.unmount(done));
      end();
    },
  };
}

/** Whether `serveNative` can work here: the reason why not, or undefined. */
export function nativeUnavailable(): string | undefined {
  try {
    loadFuse();
    return undefined;
  } catch (error) {
    return messageOf(error);
  }
}

function loadFuse(): FuseClass {
  try {
    const Fuse = createRequire(import.meta.url)('fuse-native') as FuseClass;
    // It would call fusermount, which root does not need and need not have.
    if (process.geteuid?.() === 0) Fuse.unmount = unmountAsRoot;
    return Fuse;
  } catch (error) {
    throw fail('DATA_FUSE_UNAVAILABLE', { reason: `fuse-native: ${messageOf(error).split('\n')[0]}` }, error);
  }
}

function unmountAsRoot(mountPoint: string, done: (error?: unknown) => void): void {
  try {
    umount(mountPoint, { lazy: true });
    done();
  } catch (error) {
    // Somebody else has unmounted it.
    done(systemCode(error) === 'EINVAL' ? undefined : error);
  }
}

function settle(work: (done: (error?: Error) => void) => void): Promise<void> {
  return new Promise((resolve, reject) => {
    work((error) => {
      if (error) reject(fail('DATA_FUSE_UNAVAILABLE', { reason: messageOf(error) }, error));
      else resolve();
    });
  });
}

class NativeServed {
  readonly #system = new BlobFilesSystem();
  readonly #views = new Map<number, BlobView>();
  readonly #reader: BlobReader;
  #reads = 0;
  #hits = 0;
  #failures = 0;
  #readBytes = 0;
  #largestReadBytes = 0;

  constructor({ blobs, reader }: TransportOptions) {
    this.#reader = reader;
    for (const blob of blobs) this.add(blob);
  }

  add(blob: ServedBlob): void {
    this.#system.add(blob);
  }

  stats(): TransportStats {
    return {
      reads: this.#reads,
      hits: this.#hits,
      failures: this.#failures,
      readBytes: this.#readBytes,
      resent: 0,
      largestReadBytes: this.#largestReadBytes,
    };
  }

  operations(): Operations {
    return {
      readdir: (path, done) => {
        if (path !== '/') return done(-ERRNO.ENOTDIR);
        done(0, ['.', '..', ...this.#system.blobs.map((blob) => hexOf(blob.digest))]);
      },
      getattr: (path, done) => {
        if (path === '/') return done(0, statOf(1, 0, 0o040500, 2));
        const blob = this.#find(path);
        if (blob === undefined) return done(-ERRNO.ENOENT);
        done(0, statOf(blob.node, blob.sizeBytes, 0o100444, 1));
      },
      open: (path, _flags, done) => {
        const blob = this.#find(path);
        if (blob === undefined) return done(-ERRNO.ENOENT);
        done(0, blob.node);
      },
      release: (_path, _handle, done) => done(0),
      read: (path, _handle, into, length, offset, done) => {
        const blob = this.#find(path);
        if (blob === undefined) return done(-ERRNO.EIO);
        this.#read(blob, into, Math.max(0, Math.min(length, blob.sizeBytes - offset)), offset, done);
      },
    };
  }

  #find(path: string): ServedBlob | undefined {
    return this.#system.byName(path.slice(1));
  }

  #read(blob: ServedBlob, into: Buffer, length: number, offset: number, done: (result: number) => void): void {
    this.#reads++;
    this.#largestReadBytes = Math.max(this.#largestReadBytes, length);
    if (length === 0) {
      done(0);
      return;
    }
    let view = this.#views.get(blob.node);
    if (view === undefined) {
      view = openView(blob.view);
      this.#views.set(blob.node, view);
    }
    if (view.readInto(into, 0, offset, length)) {
      this.#hits++;
      this.#readBytes += length;
      done(length);
      return;
    }
    this.#reader
      .read(blob, offset, length)
      .then((bytes) => {
        if (bytes.length !== length) throw new Error('short');
        this.#readBytes += length;
        bytes.copy(into);
        done(length);
      })
      .catch(() => {
        this.#failures++;
        done(-ERRNO.EIO);
      });
  }
}

const EPOCH = new Date(0);

function statOf(ino: number, size: number, mode: number, nlink: number): NativeStat {
  const times = { mtime: EPOCH, atime: EPOCH, ctime: EPOCH };
  return { ...times, nlink, size, blocks: Math.ceil(size / 512), mode, ino, uid: 0, gid: 0 };
}
