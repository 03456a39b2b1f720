/** Opens one EROFS layer of a store: metadata verified whole, devices bound by digest and read verified. */
import { createHash } from 'node:crypto';
import { createWriteStream } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { type Digest, digestFromHex, hexOf } from '#base';
import type { ErofsLayer } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { FileBytes, FileSource, META_IN_MEMORY_BYTES, MemoryBytes, type MetaBytes } from './byte-source.ts';
import { ErofsReader } from './erofs-reader.ts';
import { type ChunkCache, VerifiedBlob } from './verified-blob.ts';

/** A layer open for reading. */
export interface OpenLayer {
  readonly reader: ErofsReader;
  /** Digest of the metadata image, or its path when it was opened as a file. */
  readonly id: string;
  /** By slot: the blob's digest, or its path. */
  readonly deviceIds: readonly string[];
  /** By slot, where chunk digests are known. */
  readonly blobs: readonly VerifiedBlob[];
}

export async function openLayer(store: BlobStore, layer: ErofsLayer, cache: ChunkCache): Promise<OpenLayer> {
  const blobs: VerifiedBlob[] = [];
  for (const device of layer.devices) blobs.push(await VerifiedBlob.open(store, device, cache));
  const bytes = await openMeta(store, layer);
  try {
    const reader = new ErofsReader(bytes, blobs, layer.meta.digest);
    checkSlots(reader, layer);
    return { reader, id: layer.meta.digest, deviceIds: blobs.map((blob) => blob.digest), blobs };
  } catch (error) {
    bytes.close();
    throw error;
  }
}

/** The slots of the metadata must name the manifest's blobs: nothing else ties offsets in the one to bytes of the other. */
function checkSlots(reader: ErofsReader, layer: ErofsLayer): void {
  const { devices, blockSize } = reader.sb;
  const image = layer.meta.digest;
  if (devices.length !== layer.devices.length) {
    throw fail('EROFS_DEVICE_MISMATCH', {
      image,
      slot: Math.min(devices.length, layer.devices.length) + 1,
      problem: `the metadata has ${devices.length} device slots, the manifest names ${layer.devices.length} data blobs`,
    });
  }
  for (const [k, slot] of devices.entries()) {
    const { blob } = layer.devices[k]!;
    if (slot.tag !== hexOf(blob.digest)) {
      throw fail('EROFS_DEVICE_MISMATCH', {
        image,
        slot: k + 1,
        problem: `the metadata names ${/^[0-9a-f]{64}$/.test(slot.tag) ? digestFromHex(slot.tag) : 'no digest'}, the manifest ${blob.digest}`,
      });
    }
    if (slot.blocks * blockSize < blob.size || (slot.blocks - 1) * blockSize >= blob.size) {
      throw fail('EROFS_DEVICE_MISMATCH', {
        image,
        slot: k + 1,
        problem: `the metadata says ${slot.blocks} blocks of ${blockSize} bytes, the blob has ${blob.size} bytes`,
      });
    }
  }
}

async function openMeta(store: BlobStore, layer: ErofsLayer): Promise<MetaBytes> {
  const { digest, size } = layer.meta;
  if (size <= META_IN_MEMORY_BYTES) return new MemoryBytes(await store.readVerified(digest));
  const local = store.localPath(digest);
  if (local !== undefined) {
    await verifyStream(digest, store.stream(digest));
    return new FileBytes(local);
  }
  const folder = await mkdtemp(join(tmpdir(), 'dsec-meta-'));
  try {
    const path = join(folder, 'meta');
    await pipeline(Readable.from(store.stream(digest)), createWriteStream(path));
    const bytes = new FileBytes(path);
    await verifyStream(digest, piecesOf(bytes));
    return bytes;
  } finally {
    // The open descriptor keeps the bytes.
    await rm(folder, { recursive: true, force: true });
  }
}

function* piecesOf(bytes: MetaBytes): Generator<Buffer> {
  const step = 64 * 1024;
  for (let at = 0; at < bytes.sizeBytes; at += step) {
    const length = Math.min(step, bytes.sizeBytes - at);
    const start = bytes.locate(at, length);
    yield bytes.buf.subarray(start, start + length);
  }
}

async function verifyStream(digest: Digest, stream: AsyncIterable<Buffer> | Iterable<Buffer>): Promise<void> {
  const hash = createHash('sha256');
  for await (const piece of stream) hash.update(piece);
  const actual = hash.digest('hex');
  if (actual !== hexOf(digest)) {
    throw fail('EROFS_CORRUPT', { image: digest, where: 'metadata image', problem: `its digest is sha256:${actual}` });
  }
}

/** An EROFS image of any maker as files: nothing vouches for its bytes. `devices` in slot order. */
export async function openLayerFiles(metaPath: string, devices: readonly string[] = []): Promise<OpenLayer> {
  const bytes = new FileBytes(metaPath);
  const sources: FileSource[] = [];
  try {
    for (const path of devices) sources.push(await FileSource.open(path));
    const reader = new ErofsReader(bytes, sources, metaPath);
    return { reader, id: metaPath, deviceIds: devices, blobs: [] };
  } catch (error) {
    bytes.close();
    for (const source of sources) await source.close();
    throw error;
  }
}
