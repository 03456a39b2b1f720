/**
 * How large the metadata image is, which must be local before an image can be mounted, against mkfs.erofs's for the same
 * tree. Both without file data in it: dsec with --inline-limit 0, its peer with all data on an extra device. Then both as
 * they come: whole size, and the part of it that is metadata with the ends of files inlined there.
 */
import { rmSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { printTable } from './results.ts';
import { quantile } from './sample.ts';
import { timedCommand } from './timed-command.ts';
import { findMkfsErofs, MKFS_MISSING, type MkfsErofs } from './tool.ts';
import { someTrees } from './trees.ts';
import { unpackTree } from './unpacked-tree.ts';
import { withScratch } from './work-folder.ts';

/** The largest that it takes: its chunk maps are smallest so. */
const CHUNK_BYTES = 2 ** 30;

export const benchmark: Benchmark = {
  name: 'metadata-size',
  about: "size of the metadata image, against mkfs.erofs's for the same tree",
  needs: () => (findMkfsErofs() === undefined ? MKFS_MISSING : undefined),
  run: () => withScratch('metadata-size', (folder) => measure(folder, findMkfsErofs()!)),
};

async function measure(folder: string, mkfs: MkfsErofs): Promise<Result> {
  const dsec = new DsecCommand(folder);
  const rows = [];
  for (const tree of someTrees()) {
    const unpacked = await unpackTree(tree, folder);
    const source = `dir:${unpacked.folder}`;
    const bare = (await dsec.convert(source, `${tree.name}:bare`, ['--inline-limit', '0'])).image;
    const usual = (await dsec.convert(source, `${tree.name}:usual`)).image;
    const theirs = await runMkfs(mkfs, unpacked.folder, folder);
    rows.push({
      name: tree.name,
      members: unpacked.members,
      ratio: round(bare.metaBytes / theirs.bareMetaBytes),
      ourBare: bare.metaBytes,
      theirBare: theirs.bareMetaBytes,
      ourUsual: { meta: usual.metaBytes, all: usual.sizeBytes },
      theirUsual: { meta: theirs.usualMetaBytes, all: theirs.usualBytes },
      usualMetaRatio: theirs.usualMetaBytes && round(usual.metaBytes / theirs.usualMetaBytes),
      usualRatio: round(usual.sizeBytes / theirs.usualBytes),
    });
  }
  printTable([
    ['tree', 'members', 'dsec bare', 'mkfs bare', 'ratio', 'dsec meta', 'mkfs meta', 'dsec all', 'mkfs all'],
    ...rows.map((row) => [
      row.name,
      row.members,
      row.ourBare,
      row.theirBare,
      row.ratio,
      row.ourUsual.meta,
      row.theirUsual.meta ?? '?',
      row.ourUsual.all,
      row.theirUsual.all,
    ]),
  ]);
  const worst = Math.max(...rows.map((row) => row.ratio));
  const sizes = rows.map((row) => row.ourBare);
  return {
    ratio: worst,
    ...atMost(1, worst),
    against: `mkfs.erofs ${mkfs.version} --chunksize=${CHUNK_BYTES} --blobdev=FILE`,
    n: rows.length,
    p50: quantile(sizes, 0.5),
    p99: quantile(sizes, 0.99),
    unit: 'bytes',
    trees: rows,
  };
}

interface MkfsSizes {
  readonly bareMetaBytes: number;
  readonly usualBytes: number;
  /** Old versions do not say. */
  readonly usualMetaBytes: number | undefined;
}

async function runMkfs(mkfs: MkfsErofs, tree: string, folder: string): Promise<MkfsSizes> {
  const image = join(folder, 'peer.erofs');
  const blob = join(folder, 'peer.blob');
  const run = async (options: readonly string[]) => {
    rmSync(image, { force: true });
    rmSync(blob, { force: true });
    const { stdout } = await timedCommand([mkfs.path, '-d1', ...options, image, tree]);
    return { sizeBytes: statSync(image).size, stdout };
  };
  const bare = await run([`--chunksize=${CHUNK_BYTES}`, `--blobdev=${blob}`]);
  const usual = await run([]);
  const blocks = /total metadata blocks: (\d+)/.exec(usual.stdout)?.[1];
  return {
    bareMetaBytes: bare.sizeBytes,
    usualBytes: usual.sizeBytes,
    usualMetaBytes: blocks === undefined ? undefined : Number(blocks) * 4096,
  };
}
