/**
 * What is fetched of an ext4 disk out of a store by making a disk of it and mounting that, and by `ls -lR` after it: this project's node_modules,
 * published to S3, on a node that has nothing of it, shown as a loop device and mounted by the kernel. Against fetching the image.
 *
 * Also in other sizes of ZFile blocks and uncompressed: what the default was chosen by.
 */
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type { RangeSource } from '#chunk-cache';
import { createDiskFromImage, publishPoint, storeLayerOpener } from '#control';
import { type BlobStore, openDiskImage, openStore } from '#imagesvc';
import { createNamedDisk, openNamedDisk, serveFile, type ZfileOptions } from '#ublk-daemon';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { findS3Server, LoopbackServer, S3_KEYS, S3_MISSING, s3Url } from './loopback-servers.ts';
import { printTable } from './results.ts';
import { timedCommand } from './timed-command.ts';
import { findTool, needsRoot } from './tool.ts';
import { someTrees } from './trees.ts';
import { unpackTree } from './unpacked-tree.ts';
import { needSpace, withScratch } from './work-folder.ts';

const MIB = 2 ** 20;
const GIB = 2 ** 30;
const DISK_BYTES = 2 * GIB;
const FORMATS: readonly { readonly name: string; readonly zfile?: ZfileOptions }[] = [
  { name: 'zstd, 16 KiB', zfile: { algorithm: 'zstd', blockSize: 16_384 } },
  { name: 'zstd, 4 KiB', zfile: { algorithm: 'zstd', blockSize: 4096 } },
  { name: 'uncompressed' },
];

/**
 * 57 % fewer bytes than a node that fetches the whole image: what is asked of images that are read on demand (burst.bench.ts), here for
 * the worst that a start could do to a disk's metadata, which is to look at all of it.
 */
const TARGET = round(1 / (1 - 0.57));

export const benchmark: Benchmark = {
  name: 'disk-mount',
  about: 'bytes fetched from the store by an ext4 mount and ls -lR, against those of the image',
  needs: () =>
    needsRoot() ??
    (findS3Server() === undefined ? S3_MISSING : undefined) ??
    (findTool('mkfs.ext4') === undefined ? 'mkfs.ext4 is missing (apt install e2fsprogs)' : undefined),
  run: () => withScratch('disk-mount', measure),
};

interface Row {
  readonly name: string;
  readonly imageBytes: number;
  /** Making the disk and mounting it. */
  readonly mountBytes: number;
  readonly listBytes: number;
  readonly listMs: number;
  readonly reads: number;
}

async function measure(folder: string): Promise<Result> {
  needSpace(folder, 4 * GIB);
  Object.assign(process.env, S3_KEYS, { DSEC_STATE: join(folder, 'state') });
  const server = await LoopbackServer.startS3(folder);
  try {
    const tree = await unpackTree(someTrees()[0]!, folder);
    await createNamedDisk('work', { sizeBytes: DISK_BYTES, origin: { kind: 'ext4', folder: tree.folder } });
    const opened = await openNamedDisk('work');
    await opened.snapshot('all');
    await opened.disk.close();
    const store = await openStore(s3Url(server.host));
    const openStoreLayer = storeLayerOpener({ cacheDir: join(folder, 'cache') });
    const rows: Row[] = [];
    for (const [at, { name, zfile }] of FORMATS.entries()) {
      // As if it had not been published yet: what was is remembered.
      await timedCommand(['find', join(folder, 'state'), '-name', '*.published', '-delete']);
      const image = `work:${at}`;
      await publishPoint(store, 'work', async () => 1, { name: image, zfile, openStoreLayer });
      rows.push(await measureOne(join(folder, `node-${at}`), store, image, name));
    }
    printTable([
      ['layer', 'image', 'mount', 'and ls -lR', 'of the image', 'reads', 'ls -lR'],
      ...rows.map(({ name, imageBytes, mountBytes, listBytes, reads, listMs }) => [
        name,
        mib(imageBytes),
        mib(mountBytes),
        mib(listBytes),
        `${((100 * listBytes) / imageBytes).toFixed(1)} %`,
        reads,
        `${listMs.toFixed(0)} ms`,
      ]),
    ]);
    const { imageBytes, listBytes, mountBytes } = rows[0]!;
    const ratio = round(imageBytes / listBytes);
    return {
      ratio,
      ...atLeast(TARGET, ratio),
      against: 'the bytes of the image, which a node would fetch that does not read on demand',
      n: 1,
      p50: listBytes,
      p99: listBytes,
      unit: 'bytes',
      files: tree.members,
      mountBytes,
      rows: rows.map((row) => ({ ...row, listMs: round(row.listMs) })),
    };
  } finally {
    delete process.env.DSEC_STATE;
    await server.stop();
  }
}

/** A node that has nothing of the image. */
async function measureOne(folder: string, store: BlobStore, image: string, name: string): Promise<Row> {
  mkdirSync(join(folder, 'mnt'), { recursive: true });
  const fetched = { bytes: 0, reads: 0 };
  const inner = (source: RangeSource): RangeSource => ({
    async readRange(...range) {
      const bytes = await source.readRange(...range);
      fetched.bytes += bytes.length;
      fetched.reads++;
      return bytes;
    },
  });
  const openStoreLayer = storeLayerOpener({ cacheDir: join(folder, 'cache'), inner });
  const disk = `node-${name.replace(/\W/g, '')}`;
  await createDiskFromImage(disk, store, image, { openStoreLayer });
  const { layers } = (await openDiskImage(store, image)).disk;
  const opened = await openNamedDisk(disk, { openStoreLayer });
  const served = await serveFile({ target: opened.disk, path: join(folder, 'disk'), loop: true });
  const mountPoint = join(folder, 'mnt');
  try {
    await timedCommand(['mount', '-t', 'ext4', served.loop!, mountPoint]);
    try {
      const mountBytes = (await settled(() => ({ ...fetched }))).bytes;
      const listed = await timedCommand(['ls', '-lR', mountPoint]);
      const { bytes, reads } = await settled(() => ({ ...fetched }));
      const imageBytes = layers.reduce((sum, { blob }) => sum + blob.size, 0);
      return { name, imageBytes, mountBytes, listBytes: bytes, listMs: listed.ms, reads };
    } finally {
      await timedCommand(['umount', mountPoint]);
    }
  } finally {
    await served.stop();
    await opened.disk.close();
  }
}

/** What was asked for ahead may still be on its way. */
async function settled<T extends { bytes: number }>(look: () => T): Promise<T> {
  for (let last = look(); ; ) {
    await delay(300);
    const now = look();
    if (now.bytes === last.bytes) return now;
    last = now;
  }
}

function mib(bytes: number): string {
  return `${(bytes / MIB).toFixed(1)} MiB`;
}
