/**
 * Files made by the real OverlayBD tools, where the folder beside the checkout has them: each good one reads as its manifest says,
 * each damaged one is refused.
 */
import { createHash, type Hash } from 'node:crypto';
import { copyFileSync, existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { gunzipSync } from 'node:zlib';
import { describe, expect, test } from 'vitest';
import { type ByteSource, MemorySource, readBytes } from '../byte-source.ts';
import { openLayer, unwrap } from '../layer/layer-file.ts';
import { openStack } from '../layer/stack.ts';
import { mergeIndexes } from '../lsmt/merge-index.ts';
import { HOLE, Pieces, ZEROED } from '../lsmt/pieces.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';
import { StackedDisk } from '../stacked-disk.ts';
import { LogUpper } from '../writable/log-upper.ts';
import { openSparseUpper } from '../writable/sparse-upper.ts';

const FOLDER = resolve(import.meta.dirname, '../../../shared/overlaybd-golden');

interface Extent {
  readonly offset: number;
  readonly length: number;
  readonly kind: 'data' | 'hole' | 'zeroed';
  readonly sha256?: string;
}

interface Row {
  readonly file: string;
  readonly format: string;
  readonly container?: string;
  readonly virtual_size: number;
  readonly device_sha256: string;
  readonly extents: readonly Extent[];
  readonly content_sha256?: string;
  readonly original_size?: number;
  readonly tool_verify_rc?: number;
  readonly damage?: string;
  readonly index_file?: string;
  readonly parsed?: {
    readonly lsmt?: { readonly trailer: Record<string, unknown>; readonly index: readonly number[][] };
  };
}

interface Manifest {
  readonly files: readonly Row[];
  readonly stacks: readonly (Row & { readonly stack: string; readonly layers_bottom_first: readonly string[] })[];
}

const isThere = existsSync(resolve(FOLDER, 'manifest.json'));
if (!isThere) console.log('skipped: there is no ../shared/overlaybd-golden here');
const manifest: Manifest = isThere
  ? JSON.parse(readFileSync(resolve(FOLDER, 'manifest.json'), 'utf8'))
  : { files: [], stacks: [] };

function source(row: Pick<Row, 'file' | 'container'>): MemorySource {
  const bytes = readFileSync(resolve(FOLDER, row.file));
  return new MemorySource(row.file, row.container === 'gzip' ? gunzipSync(bytes) : bytes);
}

function extentsOf(index: SegmentIndex, virtualSize: number): Pieces {
  const pieces = new Pieces();
  index.lookup(0, virtualSize / 512, pieces);
  return pieces;
}

/** Kinds and lengths, then the bytes of each extent. */
async function expectDevice(index: SegmentIndex, sources: readonly ByteSource[], row: Row): Promise<void> {
  const pieces = extentsOf(index, row.virtual_size);
  const bytesOfSha = new Map<number, Extent>(row.extents.map((extent) => [extent.offset, extent]));
  const found: Extent[] = [];
  let hash: Hash | undefined;
  for (let at = 0; at < pieces.count; at++) {
    const offset = pieces.starts[at]! * 512;
    const length = pieces.ends[at]! * 512 - offset;
    const layer = pieces.layers[at]!;
    const kind = layer === HOLE ? 'hole' : layer === ZEROED ? 'zeroed' : 'data';
    if (bytesOfSha.has(offset)) hash = createHash('sha256');
    if (kind === 'data') hash!.update(await readBytes(sources[layer]!, pieces.moffsets[at]! * 512, length));
    const last = found.at(-1);
    if (last !== undefined && last.kind === kind && last.offset + last.length === offset) {
      found[found.length - 1] = { ...last, length: last.length + length, ...sha(kind, hash!) };
    } else found.push({ offset, length, kind, ...sha(kind, hash!) });
  }
  expect(found).toEqual(row.extents);
}

async function deviceDigest(index: SegmentIndex, sources: readonly ByteSource[], virtualSize: number): Promise<string> {
  const pieces = extentsOf(index, virtualSize);
  const hash = createHash('sha256');
  for (let at = 0; at < pieces.count; at++) {
    const length = (pieces.ends[at]! - pieces.starts[at]!) * 512;
    const layer = pieces.layers[at]!;
    hash.update(
      layer < 0 ? Buffer.alloc(length) : await readBytes(sources[layer]!, pieces.moffsets[at]! * 512, length),
    );
  }
  return hash.digest('hex');
}

function sha(kind: string, hash: Hash): { sha256?: string } {
  return kind === 'data' ? { sha256: hash.copy().digest('hex') } : {};
}

describe.skipIf(!isThere)('golden files of the OverlayBD tools', () => {
  const layers = manifest.files.filter(
    ({ format, damage }) => damage === undefined && /lsmt/.test(format) && !/-rw/.test(format),
  );
  test.each(layers.map((row) => [row.file, row] as const))('%s', async (_, row) => {
    const layer = await openLayer(source(row));
    expect(layer.trailer.virtualSize).toBe(row.virtual_size);
    const trailer = row.parsed!.lsmt!.trailer;
    expect(layer.trailer).toMatchObject({
      flags: trailer.flags,
      uuid: trailer.uuid,
      parentUuid: trailer.parent_uuid,
      userTag: trailer.user_tag,
      indexOffset: trailer.index_offset,
      indexEntries: trailer.index_size,
    });
    // What a sparse layer has as a hole depends on the file system it lay on.
    if (!row.file.includes('sparse')) await expectDevice(layer.index, [layer.source], row);
    if (row.virtual_size <= 64 * 1024 * 1024) {
      expect(await deviceDigest(layer.index, [layer.source], row.virtual_size)).toBe(row.device_sha256);
    }
  });

  test.each(manifest.stacks.map((stack) => [stack.stack, stack] as const))('stack %s', async (_, stack) => {
    const opened = await Promise.all(
      stack.layers_bottom_first.map((file, number) => openLayer(source({ file }), number)),
    );
    const index = mergeIndexes(opened.map((layer) => layer.index));
    await expectDevice(
      index,
      opened.map((layer) => layer.source),
      stack,
    );
  });

  const writable = manifest.files.filter(({ format }) => /-rw data/.test(format));
  test.each(writable.map((row) => [row.file, row] as const))('%s opens as a writable layer', async (_, row) => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-golden-'));
    try {
      const files = { data: join(folder, 'data'), index: join(folder, 'index') };
      copyFileSync(resolve(FOLDER, row.file), files.data);
      copyFileSync(resolve(FOLDER, row.index_file!), files.index);
      const upper = (await openSparseUpper(files.data)) ?? (await LogUpper.open(files));
      const disk = new StackedDisk(await openStack([], row.virtual_size), upper);
      if (row.virtual_size > 64 * 1024 * 1024) {
        expect(await disk.extents(0, disk.sizeBytes)).toEqual([{ length: disk.sizeBytes, hole: true, zero: true }]);
        await disk.close();
        return;
      }
      const hash = createHash('sha256');
      const step = 16 * 1024 * 1024;
      for (let at = 0; at < disk.sizeBytes; at += step) {
        hash.update(await disk.read(at, Math.min(step, disk.sizeBytes - at)));
      }
      expect(hash.digest('hex')).toBe(row.device_sha256);
      await disk.close();
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });

  const zfiles = manifest.files.filter((row) => row.content_sha256 !== undefined);
  test.each(zfiles.map((row) => [row.file, row] as const))('%s', async (_, row) => {
    const { source: inner, zfile } = await unwrap(source(row));
    expect(zfile).toBeDefined();
    expect(inner.sizeBytes).toBe(row.original_size);
    const bytes = await readBytes(inner, 0, inner.sizeBytes);
    expect(createHash('sha256').update(bytes).digest('hex')).toBe(row.content_sha256);
    await zfile!.verifyBlocks();
  });

  const bad = manifest.files.filter(({ damage }) => damage !== undefined);
  test.each(bad.map((row) => [row.file, row] as const))('%s is refused', async (_, row) => {
    const read = async () => {
      const layer = await openLayer(source(row));
      await readBytes(layer.source, 0, layer.source.sizeBytes);
    };
    await expect(read()).rejects.toMatchObject({ code: expect.stringMatching(/^(LSMT|ZFILE)_/) });
  });
});
