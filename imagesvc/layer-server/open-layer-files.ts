/**
 * Opens the files of a registered layer for good, and makes readers of what is open, in whatever thread.
 *
 * A file is proved to be its blob when it is opened, also by a server that takes over from a dead one: a proof is remembered,
 * so that costs nothing unless the file has changed. Files that a data server shows are opened around the page cache: the
 * pages of what is shown are kept where it is shown.
 */
import {
  closeSync,
  constants,
  fstatSync,
  openSync,
  read as readCallback,
  readSync,
  statfsSync,
  statSync,
} from 'node:fs';
import { promisify } from 'node:util';
import { fail } from '../errors.ts';
import { openProven } from '../mount/blob-proof.ts';
import { type ByteSource, FileBytes, META_IN_MEMORY_BYTES, MemoryBytes } from '../reader/byte-source.ts';
import { ErofsReader } from '../reader/erofs-reader.ts';
import type { LayerFile, OpenedDevice, OpenedLayer, RegisteredLayer } from './layer-facts.ts';

const readAsync = promisify(readCallback);

/** statfs's f_type. */
const FUSE_MAGIC = 0x65735546;

/** @throws MOUNT_BLOB_MISSING, MOUNT_DIGEST_MISMATCH, EROFS_CORRUPT, EROFS_UNSUPPORTED; nothing stays open then */
export async function openLayerOnce(layer: RegisteredLayer, cacheDir: string): Promise<OpenedLayer> {
  const { digest, path, sizeBytes } = layer.meta;
  const devices: OpenedDevice[] = [];
  const meta = await openProven(path, digest, sizeBytes, cacheDir);
  try {
    for (const device of layer.devices) devices.push(await openDevice(device, cacheDir));
    const large = sizeBytes > META_IN_MEMORY_BYTES;
    const opened = {
      number: layer.number,
      digest,
      devices,
      meta: large ? meta.kernelPath : intoMemory(meta.fd, sizeBytes),
    };
    // What cannot be read is refused now and not at the first look.
    readerOf(opened).root();
    if (!large) meta.close();
    return opened;
  } catch (error) {
    meta.close();
    for (const { fd } of devices) closeSync(fd);
    throw error;
  }
}

async function openDevice(file: LayerFile, cacheDir: string): Promise<OpenedDevice> {
  const { path, digest, sizeBytes } = file;
  if (!file.verifiedOnRead) {
    // The descriptor is closed by the end of the process alone.
    const { fd } = await openProven(path, digest, sizeBytes, cacheDir);
    return { fd, sizeBytes, waits: false };
  }
  let fd: number | undefined;
  try {
    const waits = statfsSync(path).type === FUSE_MAGIC;
    fd = openSync(path, constants.O_RDONLY | (waits ? constants.O_DIRECT : 0));
    const { size } = fstatSync(fd);
    if (size !== sizeBytes) {
      throw fail('MOUNT_DIGEST_MISMATCH', { path, digest, found: `${size} bytes instead of ${sizeBytes}` });
    }
    return { fd, sizeBytes, waits };
  } catch (error) {
    if (fd !== undefined) closeSync(fd);
    throw error;
  }
}

/** Whether what is open is what lies at the layer's paths now. */
export function isCurrent(opened: OpenedLayer, layer: RegisteredLayer): boolean {
  return opened.devices.every(({ fd }, slot) => {
    const ours = fstatSync(fd, { bigint: true });
    const there = statSync(layer.devices[slot]!.path, { bigint: true, throwIfNoEntry: false });
    return there !== undefined && there.ino === ours.ino && there.dev === ours.dev;
  });
}

function intoMemory(fd: number, sizeBytes: number): SharedArrayBuffer {
  const memory = new SharedArrayBuffer(sizeBytes);
  const bytes = new Uint8Array(memory);
  for (let done = 0; done < sizeBytes; ) {
    const got = readSync(fd, bytes, done, sizeBytes - done, done);
    if (got === 0) throw new Error(`the metadata image ended at byte ${done} of ${sizeBytes}`);
    done += got;
  }
  return memory;
}

/** Each thread has its own. */
export function readerOf(layer: OpenedLayer): ErofsReader {
  const { meta, devices, digest } = layer;
  const bytes = typeof meta === 'string' ? new FileBytes(meta) : new MemoryBytes(Buffer.from(meta));
  return new ErofsReader(
    bytes,
    devices.map((device) => new DescriptorSource(device)),
    digest,
  );
}

class DescriptorSource implements ByteSource {
  readonly sizeBytes: number;
  readonly #fd: number;
  readonly #waits: boolean;

  constructor({ fd, sizeBytes, waits }: OpenedDevice) {
    this.#fd = fd;
    this.sizeBytes = sizeBytes;
    this.#waits = waits;
  }

  readNow(offset: number, length: number): Buffer | undefined {
    if (this.#waits) return undefined;
    const bytes = Buffer.allocUnsafe(length);
    for (let done = 0; done < length; ) {
      const got = readSync(this.#fd, bytes, done, length - done, offset + done);
      if (got === 0) throw ended(offset + done);
      done += got;
    }
    return bytes;
  }

  async read(offset: number, length: number): Promise<Buffer> {
    const bytes = Buffer.allocUnsafe(length);
    for (let done = 0; done < length; ) {
      const { bytesRead } = await readAsync(this.#fd, bytes, done, length - done, offset + done);
      if (bytesRead === 0) throw ended(offset + done);
      done += bytesRead;
    }
    return bytes;
  }

  /** The descriptor is everybody's. */
  async close(): Promise<void> {}
}

function ended(offset: number): Error {
  return Object.assign(new Error(`the data blob ends at byte ${offset}`), { code: 'EIO' });
}
