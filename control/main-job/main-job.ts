/**
 * The main job: images to EROFS, a sandbox on top, what it changed as a new image, and that one run and verified. Tells what
 * it does as a short story with figures. Everything it makes lies in one temporary folder and goes at the end.
 */
import { mkdirSync, readdirSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { type Digest, humanSize } from '#base';
import {
  type BlobStore,
  type Change,
  changeText,
  convertToStore,
  diffTrees,
  type Image,
  mountImage,
  openStore,
  openTree,
  sizesOf,
  unmount,
  verifyImage,
} from '#imagesvc';
import { composeLayers, removeSandbox, runContainer } from '#runtime';
import { fail } from '../errors.ts';
import { packSandbox } from '../pack-sandbox.ts';
import { makeMachineImages, makeTools } from './machine-images.ts';
import {
  hasShell,
  type Input,
  machineScenario,
  type Scenario,
  sourceInput,
  sourceScenario,
  toolsInput,
} from './scenario.ts';
import { countReads, forgetReads, type StoreReads } from './store-reads.ts';
import { makeWorkFolder } from './work-folder.ts';

/** What it needs of the command line. */
export interface Stage {
  readonly signal: AbortSignal;
  readonly progress: (event: {
    task: string;
    phase: string;
    doneBytes?: number;
    totalBytes?: number;
    note?: string;
  }) => void;
  say(line: string): Promise<void>;
  defer(cleanup: () => void | Promise<void>): void;
}

export interface MainJobResult {
  /** Digest of the image it began with, converted. */
  readonly image: Digest;
  /** Inodes in all converted images. */
  readonly files: number;
  /** Of the layers as they came, compressed. */
  readonly bytesIn: number;
  /** Of all blobs in the store. */
  readonly bytesStored: number;
  /** Of the images, by the first command; null where the kernel cannot tell. */
  readonly bytesRead: number | null;
  readonly timeToFirstOutputMs: number | null;
  readonly packDiff: {
    readonly image: Digest;
    readonly inodes: number;
    readonly bytes: number;
    readonly added: number;
    readonly changed: number;
    readonly deleted: number;
  };
  readonly verified: boolean;
}

interface Converted {
  readonly images: readonly Image[];
  readonly files: number;
  readonly bytesIn: number;
  readonly bytesStored: number;
}

/** @throws what any step throws; MAIN_JOB_ROOT after the steps that need no root; MAIN_JOB_DIFFERS */
export async function runMainJob(source: string | undefined, stage: Stage): Promise<MainJobResult> {
  const started = performance.now();
  const folder = makeWorkFolder();
  stage.defer(() => rm(folder, { recursive: true, force: true }));
  const store = await openStore(join(folder, 'store'));
  const { scenario, converted } = await prepare(source, folder, store, stage);
  const { images } = converted;
  if (process.geteuid?.() !== 0) {
    await stage.say('');
    await tellVerified(store, images, stage);
    throw fail('MAIN_JOB_ROOT');
  }
  const [base, ...others] = images as [Image, ...Image[]];
  const sandbox = new Sandboxes(store, base, others, scenario, stage);

  await stage.say('');
  await tellMounted(store, images, join(folder, 'mnt'), stage);

  await stage.say('');
  await stage.say('A first command in a sandbox on top of them:');
  forgetReads(store, images);
  const first = await sandbox.run(scenario.first);
  const reads = countReads(store, images);
  await stage.say(`  ${firstOutputText(first.firstOutputMs, first.mountMs)}${readsText(reads)}`);

  await stage.say('');
  await stage.say('A second one changes files, in a sandbox that is kept:');
  const name = `main-job-${process.pid}`;
  stage.defer(() => removeSandbox(name).catch(() => {}));
  await sandbox.run(scenario.change, name);

  await stage.say('');
  await stage.say('Its changes, packed into a new image:');
  const { progress, signal } = stage;
  const packed = await packSandbox({ sandbox: name, name: 'main-job/packed:1', store: store.url, progress, signal });
  await removeSandbox(name);
  const changes = await changesOf(store, base, others, packed.image);
  for (const line of changes.lines) await stage.say(`  ${line}`);
  const packedBytes = packed.stats.metadataBytes + packed.stats.dataBytes;
  await stage.say(`  one layer: ${packed.stats.inodes} inodes, ${humanSize(packedBytes)}`);

  await stage.say('');
  await stage.say('The packed image, run:');
  const again = await new Sandboxes(store, packed.image, [], scenario, stage).run(scenario.check);
  if (again.output !== scenario.expected)
    throw fail('MAIN_JOB_DIFFERS', { expected: scenario.expected, actual: again.output });

  await stage.say('');
  const verified = await tellVerified(store, [packed.image], stage);
  await stage.say(`Done in ${seconds(performance.now() - started)}. Images and sandboxes of it are gone again.`);
  await stage.say('');
  await stage.say(
    'What is there for you: README.md has a tour; `bin/dsec --help` lists the commands, `bin/dsec doctor` what this machine has.',
  );
  return {
    image: base.manifestDigest,
    files: converted.files,
    bytesIn: converted.bytesIn,
    bytesStored: converted.bytesStored,
    bytesRead: reads.readBytes ?? null,
    timeToFirstOutputMs: first.firstOutputMs === undefined ? null : Math.round(first.firstOutputMs),
    packDiff: { image: packed.digest, inodes: packed.stats.inodes, bytes: packedBytes, ...changes.counts },
    verified,
  };
}

async function prepare(
  source: string | undefined,
  folder: string,
  store: BlobStore,
  stage: Stage,
): Promise<{ scenario: Scenario; converted: Converted }> {
  const layout = join(folder, 'layout');
  if (source === undefined) {
    const started = performance.now();
    await stage.say('Three OCI images, made of what this machine has:');
    for (const { tag, about, layers } of await makeMachineImages(layout, folder, stage.signal)) {
      const sum = (of: (layer: (typeof layers)[number]) => number) =>
        layers.reduce((total, layer) => total + of(layer), 0);
      const count = `${layers.length} layer${layers.length === 1 ? '' : 's'}`;
      const sizes = `${humanSize(sum((layer) => layer.sizeBytes))} (${humanSize(sum((layer) => layer.tarBytes))} unpacked)`;
      await stage.say(`  ${tag.padEnd(10)} ${about}: ${count}, ${sum((layer) => layer.members)} entries, ${sizes}`);
    }
    await stage.say(`  in ${seconds(performance.now() - started)}`);
    await stage.say('');
    await stage.say('Converted to EROFS:');
    const scenario = machineScenario(layout);
    return { scenario, converted: await convertAll(scenario.inputs, store, stage) };
  }
  await stage.say(`${source}, converted to EROFS:`);
  const input = sourceInput(source);
  const converted = await convertAll([input], store, stage);
  if (await hasShell(store, converted.images[0]!)) return { scenario: sourceScenario([input], false), converted };
  await stage.say('It has no shell: a static busybox is laid over it as a toolkit.');
  await makeTools(layout, stage.signal);
  const tools = toolsInput(layout);
  const both = await convertAll([tools], store, stage);
  const images = [...converted.images, ...both.images];
  return {
    scenario: sourceScenario([input, tools], true),
    converted: {
      images,
      files: converted.files + both.files,
      bytesIn: converted.bytesIn + both.bytesIn,
      bytesStored: both.bytesStored,
    },
  };
}

async function convertAll(inputs: readonly Input[], store: BlobStore, stage: Stage): Promise<Converted> {
  const images: Image[] = [];
  let files = 0;
  let bytesIn = 0;
  const started = performance.now();
  for (const { source, name, kind } of inputs) {
    const { progress, signal } = stage;
    const { image, stats, notes } = await convertToStore(store, source, name, { kind, progress, signal });
    images.push(image);
    files += stats?.inodes ?? 0;
    bytesIn += stats?.bytesIn ?? 0;
    const { metaBytes, dataBytes } = sizesOf(image);
    await stage.say(
      `  ${name.padEnd(21)} ${image.layers.length} EROFS layer${image.layers.length === 1 ? '' : 's'}, ${stats?.inodes ?? 0} inodes, ${humanSize(metaBytes)} metadata, ${humanSize(dataBytes)} data`,
    );
    for (const note of notes) await stage.say(`    ${note}`);
  }
  let bytesStored = 0;
  for await (const { sizeBytes } of store.listBlobs()) bytesStored += sizeBytes;
  await stage.say(
    `  ${humanSize(bytesIn)} in, ${humanSize(bytesStored)} stored, in ${seconds(performance.now() - started)}`,
  );
  return { images, files, bytesIn, bytesStored };
}

/** All of them on a folder, as a sandbox will see them; and off again, so that the sandbox mounts for itself. */
async function tellMounted(store: BlobStore, images: readonly Image[], target: string, stage: Stage): Promise<void> {
  const [base, ...others] = images as [Image, ...Image[]];
  const layers = composeLayers({ base, toolkits: others });
  mkdirSync(target);
  const started = performance.now();
  const { id } = await mountImage({ store, image: base, layers, target });
  const mountMs = performance.now() - started;
  try {
    const entries = readdirSync(target, { recursive: true }).length;
    await stage.say(
      `Mounted on a folder, ${layers.length} layers: ${entries} entries, after ${Math.round(mountMs)} ms`,
    );
  } finally {
    await unmount(id);
  }
}

interface Ran {
  readonly output: string;
  readonly mountMs: number;
  readonly firstOutputMs: number | undefined;
}

class Sandboxes {
  readonly #store: BlobStore;
  readonly #base: Image;
  readonly #workspace: Image | undefined;
  readonly #toolkits: readonly Image[];
  readonly #scenario: Scenario;
  readonly #stage: Stage;

  constructor(store: BlobStore, base: Image, others: readonly Image[], scenario: Scenario, stage: Stage) {
    this.#store = store;
    this.#base = base;
    this.#workspace = others.find((image) => image.kind === 'workspace');
    this.#toolkits = others.filter((image) => image.kind === 'toolkit');
    this.#scenario = scenario;
    this.#stage = stage;
  }

  /** Runs a command and shows it with its output. `keepAs`: the sandbox stays, under this name. */
  async run(command: readonly string[], keepAs?: string): Promise<Ran> {
    const { signal } = this.#stage;
    const output: Buffer[] = [];
    const errors: Buffer[] = [];
    const result = await runContainer({
      store: this.#store,
      base: this.#base,
      workspace: this.#workspace,
      toolkits: this.#toolkits,
      name: keepAs,
      keep: keepAs !== undefined,
      // The image's own entrypoint and user are for its own command.
      entrypoint: [],
      user: '0:0',
      workdir: this.#scenario.workdir,
      command,
      stdio: {
        onStdout: (bytes) => output.push(Buffer.from(bytes)),
        onStderr: (bytes) => errors.push(Buffer.from(bytes)),
      },
      signal,
      // An interrupt aborts the job as a whole.
      takeSignals: () => {},
    });
    signal.throwIfAborted();
    const text = Buffer.concat(output).toString();
    await this.#stage.say(`  $ ${command.map(quote).join(' ')}`);
    for (const line of lines(text)) await this.#stage.say(`  ${line}`);
    for (const line of lines(Buffer.concat(errors).toString())) await this.#stage.say(`  ${line}`);
    if (result.exitCode !== 0) throw fail('MAIN_JOB_COMMAND', { command: command.join(' '), status: result.exitCode });
    return { output: text, mountMs: result.timings.mountMs, firstOutputMs: result.timings.firstOutputMs };
  }
}

/** What the packed image changed, seen in the trees, not in the upper: against what was composed below it. */
async function changesOf(
  store: BlobStore,
  base: Image,
  others: readonly Image[],
  packed: Image,
): Promise<{ lines: string[]; counts: { added: number; changed: number; deleted: number } }> {
  // Its own layer is the last one; without it, it is what the sandbox ran on.
  const before =
    others.length === 0 ? base : { ...packed, layers: packed.layers.slice(0, -1), ownLayers: packed.layers.length - 1 };
  const a = await openTree(store, before);
  try {
    const b = await openTree(store, packed);
    try {
      const counts = { added: 0, changed: 0, deleted: 0 };
      const shown: Change[] = [];
      for await (const change of diffTrees(a, b)) {
        counts[change.change]++;
        // A folder whose time alone changed says nothing that its entries do not.
        if (!(change.kind === 'dir' && change.what.join() === 'mtime')) shown.push(change);
      }
      return { lines: shown.map(changeText), counts };
    } finally {
      await b.close();
    }
  } finally {
    await a.close();
  }
}

async function tellVerified(store: BlobStore, images: readonly Image[], stage: Stage): Promise<boolean> {
  let ok = true;
  let blobs = 0;
  let blobBytes = 0;
  for (const image of images) {
    const report = await verifyImage(store, image, { progress: stage.progress });
    ok &&= report.ok;
    blobs += report.blobs;
    blobBytes += report.blobBytes;
    for (const { blob, problem } of report.problems) await stage.say(`  ${blob}: ${problem}`);
  }
  await stage.say(
    `Verified: ${blobs} blobs, ${humanSize(blobBytes)}, every byte against its digest: ${ok ? 'ok' : 'DAMAGED'}.`,
  );
  return ok;
}

function firstOutputText(firstOutputMs: number | undefined, mountMs: number): string {
  return firstOutputMs === undefined
    ? 'no output'
    : `first output after ${Math.round(firstOutputMs)} ms, mounting included (${mountMs.toFixed(1)} ms)`;
}

function readsText({ readBytes, ofBytes }: StoreReads): string {
  if (readBytes === undefined) return '';
  return `; read ${humanSize(readBytes)} of ${humanSize(ofBytes)} (${Math.round((100 * readBytes) / Math.max(1, ofBytes))} %)`;
}

function seconds(ms: number): string {
  return `${(ms / 1000).toFixed(1)} s`;
}

function lines(text: string): string[] {
  return text === '' ? [] : text.replace(/\n$/, '').split('\n');
}

function quote(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
