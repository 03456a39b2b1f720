/**
 * How much more is fetched than a command touches: an image of packages, mounted lazily from S3, of which 4 to 13 % is read, whole
 * packages as programs do, single files in no order, and the beginnings of files. Touched are the 4 KiB pages that
 * were read; what comes on top is the rest of their 256 KiB chunks, and what was read ahead for nothing.
 */
import { closeSync, openSync, readdirSync, readSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { convertToStore, type Image, openImage, openStore } from '#imagesvc';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { barChart } from './figures/svg.ts';
import { type CacheNumbers, LazyNode } from './lazy-image.ts';
import { findS3Server, LoopbackServer, S3_KEYS, S3_MISSING, s3Url } from './loopback-servers.ts';
import { numberOption } from './options.ts';
import { type PackageImage, shellLayer, somePackages, writePackageImage } from './package-image.ts';
import { printTable, saveFigure } from './results.ts';
import { busyboxMissing } from './small-image.ts';
import { needsRoot } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

const MIB = 2 ** 20;
const PAGE = 4096;
/** As the header says: of the bytes of the image. */
const PARTS = [0.04, 0.08, 0.13];
/**
 * A burst is to write 57 % fewer bytes than one that pulls its images (burst.bench.ts), while a command reads up to 13 % of them: so
 * nothing may fetch more than 43 % of an image, and no byte touched may cost more than 43 / 13 of them.
 */
const SHARE_LIMIT = 0.43;
const RATIO_LIMIT = round(SHARE_LIMIT / Math.max(...PARTS));

export const benchmark: Benchmark = {
  name: 'bytes-fetched',
  about: 'bytes fetched over bytes touched, for commands that read 4 to 13 % of an image',
  needs: () => needsRoot() ?? (findS3Server() === undefined ? S3_MISSING : undefined) ?? busyboxMissing(),
  run: () => withScratch('fetched', measure),
};

interface Row {
  readonly name: string;
  readonly part: number;
  readonly touchedBytes: number;
  /** In whole chunks: nothing that reads ranges of 256 KiB could fetch less. */
  readonly fetchedBytes: number;
  readonly aheadBytes: number;
  readonly ratio: number;
}

async function measure(folder: string): Promise<Result> {
  const sizeBytes = numberOption('mb', 128) * MIB;
  needSpace(folder, sizeBytes * 5);
  Object.assign(process.env, S3_KEYS);
  const server = await LoopbackServer.startS3(folder);
  try {
    const packaged = await writePackageImage(
      join(folder, 'image'),
      1,
      sizeBytes,
      await shellLayer(join(folder, 'shell')),
    );
    const store = await openStore(s3Url(server.host));
    await convertToStore(store, `oci:${packaged.layout}`, 'packages:1');
    const image = await openImage(store, 'packages:1');
    const rows: Row[] = [];
    for (const [name, read] of Object.entries(READERS)) {
      for (const part of PARTS) {
        const node = new LazyNode(join(folder, `${name}-${part}`), store);
        try {
          rows.push(await measureOne(node, image, packaged, name, part, read));
        } finally {
          await node.stop();
        }
      }
    }
    printTable([
      ['reads', 'part', 'touched', 'fetched', 'ahead', 'fetched/touched'],
      ...rows.map(({ name, part, touchedBytes, fetchedBytes, aheadBytes, ratio }) => [
        name,
        `${(100 * part).toFixed(0)} %`,
        mib(touchedBytes),
        mib(fetchedBytes),
        mib(aheadBytes),
        ratio,
      ]),
    ]);
    const whole = rows.filter(({ name }) => name === 'packages').map(({ ratio }) => ratio);
    const figure = saveFigure(
      'bytes-fetched',
      barChart({
        title: 'Bytes fetched for each byte touched',
        unit: 'x',
        series: PARTS.map((part) => `${(100 * part).toFixed(0)} % of the image`),
        groups: Object.keys(READERS).map((name) => ({
          label: name,
          values: rows.filter((row) => row.name === name).map(({ ratio }) => ratio),
        })),
      }),
    );
    const ratio = Math.max(...whole);
    const share = round(Math.max(...rows.map(({ fetchedBytes }) => fetchedBytes)) / packaged.dataBytes);
    return {
      ratio,
      target: `<= ${RATIO_LIMIT}, and nobody more than ${SHARE_LIMIT} of the image`,
      met: atMost(RATIO_LIMIT, ratio).met && share <= SHARE_LIMIT,
      share,
      against: 'the 4 KiB pages that were read',
      n: rows.length,
      p50: rows[1]!.fetchedBytes,
      p99: rows[2]!.fetchedBytes,
      unit: 'bytes',
      imageBytes: packaged.dataBytes,
      rows,
      figure,
    };
  } finally {
    await server.stop();
  }
}

type Read = (root: string, image: PackageImage, part: number) => Promise<number>;

/** Each answers how many bytes it touched, in pages. */
const READERS: Readonly<Record<string, Read>> = {
  packages: async (root, image, part) => {
    let touched = 0;
    for (const path of somePackages(image, part, 5)) {
      const folder = join(root, path);
      for (const name of readdirSync(folder)) touched += pages((await readFile(join(folder, name))).length);
    }
    return touched;
  },
  'single files': async (root, image, part) => {
    const files = image.packages.flatMap((path) => readdirSync(join(root, path)).map((name) => join(root, path, name)));
    let touched = 0;
    for (let i = 0; touched < image.dataBytes * part; i++) {
      touched += pages((await readFile(files[(i * 7919) % files.length]!)).length);
    }
    return touched;
  },
  beginnings: async (root, image, part) => {
    const bytes = Buffer.alloc(PAGE);
    const count = Math.floor(image.packages.length * part * 20);
    const files = image.packages.flatMap((path) => readdirSync(join(root, path)).map((name) => join(root, path, name)));
    for (let i = 0; i < count; i++) {
      const fd = openSync(files[(i * 7919) % files.length]!, 'r');
      readSync(fd, bytes, 0, 256, 0);
      closeSync(fd);
    }
    return count * PAGE;
  },
};

async function measureOne(
  node: LazyNode,
  image: Image,
  packaged: PackageImage,
  name: string,
  part: number,
  read: Read,
): Promise<Row> {
  const target = join(node.folders.runDir, '../mount');
  await node.mount(image, target);
  const before = await node.cacheNumbers();
  const touchedBytes = await read(target, packaged, part);
  const after = await settled(node);
  const aheadBytes = after.prefetchBytes - before.prefetchBytes;
  const fetchedBytes = after.interactiveBytes - before.interactiveBytes + aheadBytes;
  return { name, part, touchedBytes, fetchedBytes, aheadBytes, ratio: round(fetchedBytes / touchedBytes) };
}

/** What was asked for ahead may still be on its way. */
async function settled(node: LazyNode): Promise<CacheNumbers> {
  for (let last = await node.cacheNumbers(); ; ) {
    await new Promise((done) => setTimeout(done, 300));
    const now = await node.cacheNumbers();
    if (now.prefetchBytes === last.prefetchBytes && now.interactiveBytes === last.interactiveBytes) return now;
    last = now;
  }
}

function pages(bytes: number): number {
  return Math.ceil(bytes / PAGE) * PAGE;
}

function mib(bytes: number): string {
  return `${(bytes / MIB).toFixed(1)} MiB`;
}
