/**
 * A burst of sandboxes over images that the node has never seen, each of several layers, of which a command reads 4 to 13 %: on demand
 * from an S3 server, against `docker pull` and `docker run` from a registry, both behind the same limit of bandwidth and latency,
 * and against everything being local already. Reported are the completion of each sandbox over time, and what the node wrote
 * to its disk.
 *
 * The shape is that of a node of a cluster, cut down to this machine: 25 Gbit/s for 128 cores are 400 Mbit/s for two; so
 * many sandboxes at a time as a scheduler would give two cores; commands that load some packages, compute on them, and wait
 * for what an agent waits for, one package after another.
 */
import {
  createReadStream,
  existsSync,
  mkdirSync,
  readdirSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { convertBatch, openStore, syncImages } from '#imagesvc';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { eagerSide, localSide, onDemandSide, type Side } from './burst-sides.ts';
import { dockerMissing } from './docker-daemon.ts';
import { barChart, lineChart } from './figures/svg.ts';
import { LimitedLink } from './limited-link.ts';
import { findS3Server, LoopbackServer, S3_KEYS, S3_MISSING, s3Url } from './loopback-servers.ts';
import { type DiskWrites, NodeDisk } from './node-disk.ts';
import { hasFlag, numberOption } from './options.ts';
import { type PackageImage, packageImageIn, shellLayer, somePackages, writePackageImage } from './package-image.ts';
import { printTable, saveFigure } from './results.ts';
import { median, quantile } from './sample.ts';
import { settle } from './settle.ts';
import { busyboxMissing } from './small-image.ts';
import { timedCommand } from './timed-command.ts';
import { missingTool, needsRoot } from './tool.ts';
import { cacheFolder, needSpace, withScratch } from './work-folder.ts';

const MIB = 2 ** 20;
const LINK = { bytesPerSecond: 50_000_000, latencyMs: 2 };
const AT_ONCE = 4;
/** Of an image; sandbox by sandbox another one. */
const PARTS = [0.04, 0.07, 0.1, 0.13];
/** What a command does with each of its packages. */
const COMPUTED_BYTES = 24 * MIB;
const WAIT_SECONDS = 1.5;

const SLOWER_THAN_LOCAL = 1.1;
const EAGER_SLOWER = 1.7;
const FEWER_BYTES = 0.57;

export const benchmark: Benchmark = {
  name: 'burst',
  about: 'a burst of sandboxes over many images: on demand, against docker pull, against everything local',
  needs: () =>
    needsRoot() ??
    dockerMissing() ??
    (findS3Server() === undefined ? S3_MISSING : undefined) ??
    missingTool({ 'docker-registry': 'docker-registry', skopeo: 'skopeo', crun: 'crun', 'mkfs.ext4': 'e2fsprogs' }) ??
    busyboxMissing(),
  run: () => withScratch('burst', measure),
};

interface Measured {
  /** Seconds from the beginning of the burst to the end of each sandbox, in order. */
  readonly doneAt: readonly number[];
  readonly writes: DiskWrites;
  /** That came over the link. */
  readonly linkBytes: number;
  readonly fetchedBytes: number;
  readonly outputs: ReadonlyMap<string, string>;
}

type SideName = 'local' | 'on demand' | 'eager';

async function measure(folder: string): Promise<Result> {
  const [count, mib] = hasFlag('full') ? [12, 250] : [8, 120];
  const sizeBytes = numberOption('mb', mib) * MIB;
  needSpace(folder, count * sizeBytes * 7);
  Object.assign(process.env, S3_KEYS);
  const images = await packageImages(count, sizeBytes);
  const s3 = await LoopbackServer.startS3(join(folder, 's3'));
  const registry = await LoopbackServer.startRegistry(join(folder, 'registry'));
  try {
    const store = join(folder, 'store');
    await fillStores(images, store, s3.host, registry.host);
    const names = [...images.keys()];
    const commands = new Map(names.map((name, i) => [name, commandFor(images.get(name)!, i)]));
    const diskBytes = Math.ceil(count * sizeBytes * 2.5 + 512 * MIB);
    let dockerVersion = '';
    const sides: Record<SideName, () => Promise<Measured>> = {
      local: () => measureSide(folder, diskBytes, commands, undefined, (at) => localSide(at, store)),
      'on demand': () =>
        behindLink(s3.host, join(folder, 's3'), (remote) =>
          measureSide(folder, diskBytes, commands, remote, (at) => onDemandSide(at, remote.link.host)),
        ),
      eager: () =>
        behindLink(registry.host, join(folder, 'registry'), (remote) =>
          measureSide(folder, diskBytes, commands, remote, async (at) => {
            const side = await eagerSide(at, remote.link.host);
            dockerVersion = side.version;
            return side;
          }),
        ),
    };
    const n = numberOption('n', 1);
    const runs: Record<SideName, Measured[]> = { local: [], 'on demand': [], eager: [] };
    for (let run = 0; run < n; run++) {
      for (const [name, side] of Object.entries(sides) as [SideName, () => Promise<Measured>][]) {
        const measured = await side();
        runs[name].push(measured);
        console.log(
          `${name}: all done after ${measured.doneAt.at(-1)!.toFixed(1)} s, ${mibOf(measured.writes.bytes)} written`,
        );
      }
    }
    return report(runs, images, n, dockerVersion);
  } finally {
    await s3.stop();
    await registry.stop();
  }
}

function report(
  runs: Record<SideName, Measured[]>,
  images: ReadonlyMap<string, PackageImage>,
  n: number,
  dockerVersion: string,
): Result {
  const expected = runs.local[0]!.outputs;
  for (const [side, measured] of Object.entries(runs)) {
    for (const { outputs } of measured) {
      for (const [name, output] of outputs) {
        if (output !== expected.get(name)) throw new Error(`${side}: the sandbox of ${name} has read other bytes`);
      }
    }
  }
  const names = Object.keys(runs) as SideName[];
  const totals = of(runs, ({ doneAt }) => doneAt.at(-1)!);
  const middles = of(runs, ({ doneAt }) => median(doneAt));
  const bytes = of(runs, ({ writes }) => writes.bytes);
  const requests = of(runs, ({ writes }) => writes.requests);
  const linkBytes = of(runs, (measured) => measured.linkBytes);
  printTable([
    ['', 'all done', 'half done', 'written', 'write requests', 'requests/s', 'over the link'],
    ...names.map((name) => [
      name,
      `${totals[name].toFixed(1)} s`,
      `${middles[name].toFixed(1)} s`,
      mibOf(bytes[name]),
      String(requests[name]),
      (requests[name] / totals[name]).toFixed(0),
      mibOf(linkBytes[name]),
    ]),
  ]);
  const overLocal = totals['on demand'] / totals.local;
  const eagerOver = totals.eager / totals['on demand'];
  const fewer = 1 - bytes['on demand'] / bytes.eager;
  const firstTarget = atMost(SLOWER_THAN_LOCAL, overLocal);
  const count = images.size;
  const size = mibOf([...images.values()][0]!.dataBytes);
  const shape = `${count} images of ${size}, ${AT_ONCE} at a time, ${LINK.bytesPerSecond / 1e6} MB/s and ${LINK.latencyMs} ms`;
  const figures = [
    saveFigure(
      'burst-completion',
      lineChart({
        title: `Sandboxes completed: ${shape}`,
        xLabel: 'seconds',
        yLabel: 'sandboxes',
        series: names.map((name) => ({ label: name, points: completion(runs[name][0]!.doneAt) })),
      }),
    ),
    saveFigure(
      'burst-disk',
      barChart({
        title: `Written to the node’s disk: ${shape}`,
        unit: 'MiB',
        series: ['bytes written'],
        groups: names.map((name) => ({ label: name, values: [round(bytes[name] / MIB)] })),
      }),
    ),
    saveFigure(
      'burst-iops',
      barChart({
        title: `Write requests of the node’s disk a second: ${shape}`,
        unit: '/s',
        series: ['write requests'],
        groups: names.map((name) => ({ label: name, values: [round(requests[name] / totals[name])] })),
      }),
    ),
  ];
  const own = runs['on demand'].flatMap(({ doneAt }) => doneAt.map((s) => s * 1000));
  return {
    ratio: round(overLocal),
    target: `${firstTarget.target}; eager >= ${EAGER_SLOWER}; fewer bytes >= ${FEWER_BYTES}`,
    met: firstTarget.met && eagerOver >= EAGER_SLOWER && fewer >= FEWER_BYTES,
    against: `everything local; docker pull and run, dockerd ${dockerVersion}, overlay2`,
    n,
    p50: round(median(own)),
    p99: round(quantile(own, 0.99)),
    unit: 'ms',
    eagerOverOnDemand: round(eagerOver),
    fewerBytesWritten: round(fewer),
    images: count,
    imageBytes: [...images.values()][0]!.dataBytes,
    link: LINK,
    atOnce: AT_ONCE,
    totalSeconds: rounded(totals),
    writtenBytes: bytes,
    writeRequests: requests,
    linkBytes,
    fetchedBytes: median(runs['on demand'].map(({ fetchedBytes }) => fetchedBytes)),
    figures,
  };
}

/** The median over the runs of each side. */
function of(runs: Record<SideName, Measured[]>, value: (measured: Measured) => number): Record<SideName, number> {
  const entries = Object.entries(runs).map(([name, measured]) => [name, median(measured.map(value))]);
  return Object.fromEntries(entries) as Record<SideName, number>;
}

function rounded(values: Record<SideName, number>): Record<string, number> {
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, round(value)]));
}

/** From none at 0 s, a step at each sandbox. */
function completion(doneAt: readonly number[]): [number, number][] {
  const points: [number, number][] = [[0, 0]];
  doneAt.forEach((at, i) => {
    points.push([at, i], [at, i + 1]);
  });
  return points;
}

/** Shell that loads packages, computes on each, and waits; prints what it has read, as a digest. */
function commandFor(image: PackageImage, number: number): string[] {
  const packages = somePackages(image, PARTS[number % PARTS.length]!, number);
  const script = [
    'set -e',
    `for p in ${packages.join(' ')}; do`,
    'cat $p/* | sha256sum',
    `head -c ${COMPUTED_BYTES} /dev/zero | sha256sum > /dev/null`,
    `sleep ${WAIT_SECONDS}`,
    'done',
  ];
  return ['/bin/sh', '-c', script.join('\n').replace('do\n', 'do ')];
}

async function measureSide(
  folder: string,
  diskBytes: number,
  commands: ReadonlyMap<string, readonly string[]>,
  remote: Remote | undefined,
  make: (at: string) => Promise<Side>,
): Promise<Measured> {
  const disk = NodeDisk.make(join(folder, 'n'), diskBytes);
  try {
    const side = await make(disk.mountPoint);
    try {
      settle();
      coldCaches();
      if (remote !== undefined) await readAll(remote.files);
      const before = disk.syncedWrites();
      const bytesBefore = (await remote?.link.bytes()) ?? 0;
      const { doneAt, outputs } = await burst(side, commands);
      const after = disk.syncedWrites();
      return {
        doneAt,
        outputs,
        writes: { bytes: after.bytes - before.bytes, requests: after.requests - before.requests },
        fetchedBytes: (await side.fetchedBytes?.()) ?? 0,
        linkBytes: ((await remote?.link.bytes()) ?? 0) - bytesBefore,
      };
    } finally {
      await side.stop();
    }
  } finally {
    disk.remove();
    rmSync(disk.mountPoint, { recursive: true, force: true });
  }
}

/** All of them wait from the beginning; AT_ONCE run at a time. */
async function burst(side: Side, commands: ReadonlyMap<string, readonly string[]>) {
  const waiting = [...commands];
  const doneAt: number[] = [];
  const outputs = new Map<string, string>();
  const from = performance.now();
  const work = async () => {
    for (let next = waiting.shift(); next !== undefined; next = waiting.shift()) {
      const [image, command] = next;
      outputs.set(image, await side.run(image, command));
      doneAt.push((performance.now() - from) / 1000);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return { doneAt, outputs };
}

/** A server and its link. Its files are read before each run: it is another machine, whose disk is not what is measured. */
interface Remote {
  readonly link: LimitedLink;
  readonly files: string;
}

async function behindLink(host: string, files: string, work: (remote: Remote) => Promise<Measured>): Promise<Measured> {
  const link = await LimitedLink.start(host, LINK);
  try {
    return await work({ link, files });
  } finally {
    await link.stop();
  }
}

function coldCaches(): void {
  writeFileSync('/proc/sys/vm/drop_caches', '3');
}

async function readAll(folder: string): Promise<void> {
  for (const path of readdirSync(folder, { recursive: true, encoding: 'utf8' })) {
    const file = join(folder, path);
    if (statSync(file).isFile()) for await (const _ of createReadStream(file, { highWaterMark: MIB }));
  }
}

/** Kept between runs: compressing them takes longest. */
async function packageImages(count: number, sizeBytes: number): Promise<Map<string, PackageImage>> {
  const folder = join(cacheFolder(), `packages-${Math.round(sizeBytes / MIB)}`);
  const images = new Map<string, PackageImage>();
  const shell = await shellLayer(join(cacheFolder(), 'shell'));
  mkdirSync(folder, { recursive: true });
  for (let i = 0; i < count; i++) {
    const place = join(folder, String(i));
    if (!existsSync(place)) {
      const staging = `${place}.${process.pid}`;
      rmSync(staging, { recursive: true, force: true });
      await writePackageImage(staging, i, sizeBytes, shell);
      renameSync(staging, place);
      console.log(`image ${i + 1} of ${count} made`);
    }
    images.set(`environment-${i}:1`, packageImageIn(place, i, sizeBytes));
  }
  return images;
}

async function fillStores(
  images: ReadonlyMap<string, PackageImage>,
  folder: string,
  s3Host: string,
  registryHost: string,
): Promise<void> {
  const store = await openStore(`file://${folder}`);
  // Together: what they share becomes a layer that they share.
  const items = [...images].map(([name, { layout }]) => ({ name, source: `oci:${layout}` }));
  for (const outcome of await convertBatch(store, items)) if ('error' in outcome) throw outcome.error;
  await syncImages(store, await openStore(s3Url(s3Host)), [...images.keys()]);
  for (const [name, { layout }] of images) {
    const target = `docker://${registryHost}/${name}`;
    await timedCommand(['skopeo', 'copy', '--quiet', '--dest-tls-verify=false', `oci:${layout}`, target]);
  }
}

function mibOf(bytes: number): string {
  return `${(bytes / MIB).toFixed(0)} MiB`;
}
