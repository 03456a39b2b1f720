/**
 * What a byte costs that is not there yet: the latency of one 4 KiB read through a lazy mount, whose chunk (256 KiB) has to come from
 * an S3 server, against that server's own answer to a GET of the same 256 KiB. Both one at a time, over kept connections,
 * on loopback (where our share shows most) and with a network's latency in between.
 */
import { closeSync, openSync, readSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Digest } from '#base';
import { CHUNK_BYTES, convertToStore, openImage, openStore, storeRangeSource } from '#imagesvc';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { writeLargeFiles } from './generated-tar.ts';
import { LazyNode } from './lazy-image.ts';
import { LimitedLink } from './limited-link.ts';
import { findS3Server, LoopbackServer, S3_KEYS, S3_MISSING, s3Url } from './loopback-servers.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { median, summary } from './sample.ts';
import { needsRoot } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

const TARGET = 1.2;
const MIB = 2 ** 20;
const READ_BYTES = 4096;
/** Of both: connections, code that the engine has to compile first. */
const WARM_UP = 30;
const LATENCIES_MS = [0, 1, 5];

export const benchmark: Benchmark = {
  name: 'cold-read',
  about: 'a cold 4 KiB read through a lazy mount, against the GET of its 256 KiB from the S3 server',
  needs: () => needsRoot() ?? (findS3Server() === undefined ? S3_MISSING : undefined),
  run: () => withScratch('cold', measure),
};

async function measure(folder: string): Promise<Result> {
  const n = numberOption('n', 150);
  const sizeBytes = Math.ceil((3 * (n + WARM_UP + 1) * CHUNK_BYTES) / MIB) * MIB;
  needSpace(folder, sizeBytes * 5);
  Object.assign(process.env, S3_KEYS);
  const server = await LoopbackServer.startS3(folder);
  try {
    const tar = writeLargeFiles(join(folder, 'layer.tar'), sizeBytes);
    await convertToStore(await openStore(s3Url(server.host)), `tar:${tar.path}`, 'large:1');
    const rows: string[][] = [['latency added', 'GET 256 KiB', 'cold read', 'ratio']];
    const details: Record<string, Measured> = {};
    for (const latencyMs of LATENCIES_MS) {
      const link =
        latencyMs === 0 ? undefined : await LimitedLink.start(server.host, { bytesPerSecond: 10_000 * MIB, latencyMs });
      try {
        const url = s3Url(link?.host ?? server.host);
        const measured = await compare(join(folder, `node-${latencyMs}`), url, n);
        details[`${latencyMs} ms`] = measured;
        rows.push([`${latencyMs} ms`, `${measured.get.p50} ms`, `${measured.read.p50} ms`, String(measured.ratio)]);
      } finally {
        await link?.stop();
      }
    }
    printTable(rows);
    const { ratio, read } = details['0 ms']!;
    return {
      ratio,
      ...atMost(TARGET, ratio),
      against: 'GET with a range, undici, signed; versitygw on loopback',
      n,
      p50: read.p50,
      p99: read.p99,
      unit: 'ms',
      latencies: details,
    };
  } finally {
    await server.stop();
  }
}

interface Measured {
  readonly ratio: number;
  readonly get: ReturnType<typeof summary>;
  readonly read: ReturnType<typeof summary>;
}

async function compare(folder: string, url: string, n: number): Promise<Measured> {
  const store = await openStore(url);
  const image = await openImage(store, 'large:1');
  const node = new LazyNode(folder, store);
  const source = storeRangeSource(store);
  const blob = image.layers[0]!.devices[0]!.blob.digest as Digest;
  const target = join(folder, 'mount');
  await node.mount(image, target);
  const file = openSync(join(target, 'large/file-0'), 'r');
  const bytes = Buffer.alloc(READ_BYTES);
  // Of each three chunks one is the mount's and one the GET's: nobody ever seems to read on, so nothing is read ahead.
  const triples = shuffled(n + WARM_UP);
  const read = (triple: number) => {
    const offset = (triple * 3 + 1) * CHUNK_BYTES + CHUNK_BYTES / 2;
    const from = performance.now();
    if (readSync(file, bytes, 0, READ_BYTES, offset) !== READ_BYTES) throw new Error('a short read');
    return performance.now() - from;
  };
  const get = async (triple: number) => {
    const offset = (triple * 3 + 2) * CHUNK_BYTES;
    const from = performance.now();
    await source.readRange(blob, offset, CHUNK_BYTES, { priority: 'interactive' });
    return performance.now() - from;
  };
  const reads: number[] = [];
  const gets: number[] = [];
  try {
    for (const [i, triple] of triples.entries()) {
      // What a read leaves to do behind it (the chunk goes to the disk) is not the next one's.
      await sleep(10);
      const readMs = read(triple);
      await sleep(10);
      const getMs = await get(triple);
      if (i < WARM_UP) continue;
      reads.push(readMs);
      gets.push(getMs);
    }
  } finally {
    closeSync(file);
    await node.stop();
  }
  return { ratio: round(median(reads) / median(gets)), get: summary(gets), read: summary(reads) };
}

/** 0 to `count` - 1, in no order, always the same. */
function shuffled(count: number): number[] {
  const all = Array.from({ length: count }, (_, i) => i);
  let seed = 1;
  for (let i = all.length - 1; i > 0; i--) {
    seed = (seed * 1_103_515_245 + 12_345) % 2 ** 31;
    const j = seed % (i + 1);
    [all[i], all[j]] = [all[j]!, all[i]!];
  }
  return all;
}
