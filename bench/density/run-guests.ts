/**
 * Guests of the density benchmark: machines of the product's own making, on layers that its converter made, that do in turn what sandboxes do; what the host
 * holds for them, looked at while they run.
 */
import { randomBytes } from 'node:crypto';
import { copyFileSync, mkdirSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { dropCached } from '#linux';
import {
  type GuestMemory,
  memoryGuestWrites,
  memoryKernelArguments,
  openQemuDriver,
  type RunningVm,
  type VmDrive,
  type VmSpec,
} from '#runtime';
import { round } from '../benchmark.ts';
import { DsecCommand } from '../dsec-command.ts';
import { labKernel, must } from '../lab/kernel.mjs';
import { guestInitrd } from './guest-initrd.ts';
import { type HostMemory, hostMemory, totalBytes } from './host-memory.ts';

export const MIB = 2 ** 20;
export const GUEST_MIB = 320;
const DISK_MIB = 192;
const FILE_BYTES = 512 * 1024;
const HOT_MIB = 48;
const PART_MIB = 20;
const ROUNDS = 3;
const BUILD_MIB = 40;
const WRITE_MIB = 12;
const THINK_S = 6;
const IDLE_S = 16;
/** Guests begin so long after each other. */
const STAGGER_S = 6;
const COLD_MS = 4000;
const SAMPLE_MS = 500;
/** Until a guest says what it should: emulated, on a machine that has other work. */
const GUEST_MS = 600_000;

const WRITES = memoryGuestWrites({ pmem: true, reporting: true, damon: true }, GUEST_MIB * MIB, COLD_MS);

export interface Sample extends HostMemory {
  readonly seconds: number;
}

export interface Run {
  readonly name: string;
  readonly samples: readonly Sample[];
  readonly peak: number;
  /** Mean over the run: the integral, divided by its length, so that a run that took a moment longer is no worse for it. */
  readonly mean: number;
  readonly cpuSeconds: number;
  readonly said: readonly string[];
}

export interface Site {
  readonly folder: string;
  readonly kernel: string;
  readonly initrd: string;
  /** Metadata image, data. */
  readonly layer: readonly [string, string];
}

/** A layer without inline data, as DAX needs, by our own converter; its blobs in whole 2 MiB, as pmem needs. */
export async function prepare(folder: string): Promise<Site> {
  const kernel = labKernel();
  const tree = join(folder, 'tree');
  const write = (name: string, mib: number) => {
    mkdirSync(join(tree, name), { recursive: true });
    for (let i = 0; i < (mib * MIB) / FILE_BYTES; i++) writeFileSync(join(tree, name, `${i}`), randomBytes(FILE_BYTES));
  };
  write('hot', HOT_MIB);
  for (let i = 0; i < ROUNDS; i++) write(`part-${i}`, PART_MIB);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`dir:${tree}`, 'layer:1', ['--inline-limit', '0']);
  rmSync(tree, { recursive: true });
  const shown = await dsec.run(['inspect', 'layer:1', '--json']);
  const layer = blobsOf(shown.stdout).map((hex, at) => {
    const path = join(folder, ['metadata', 'data'][at]!);
    copyFileSync(join(dsec.store, 'blobs/sha256', hex), path);
    const { length } = readFileSync(path);
    truncateSync(path, Math.ceil(length / (2 * MIB)) * 2 * MIB);
    return path;
  });
  must('sync', []);
  mkdirSync(join(folder, 'initrd'));
  const initrd = guestInitrd(kernel, join(folder, 'initrd'), WRITES);
  return { folder, kernel: kernel.image, initrd, layer: [layer[0]!, layer[1]!] };
}

/** Digests, in hexadecimal, of the only layer's metadata image and data. */
function blobsOf(inspected: string): string[] {
  interface Descriptor {
    readonly digest: string;
    readonly annotations?: Readonly<Record<string, string>>;
  }
  const { manifest } = JSON.parse(inspected) as { manifest: { layers: readonly Descriptor[] } };
  const ofRole = (role: string) => manifest.layers.find((one) => one.annotations?.['org.erofs.role'] === role);
  return [ofRole('overlay-lower')!, ofRole('device')!].map(({ digest }) => digest.slice('sha256:'.length));
}

/** All guests of one variant, from when all have booted to when the last is done. */
export async function runGuests(site: Site, name: string, memory: GuestMemory, count: number): Promise<Run> {
  const driver = openQemuDriver();
  const folder = join(site.folder, name);
  mkdirSync(folder);
  const specs = Array.from({ length: count }, (_, at) => guestSpec(site, folder, at, memory, driver.clockArguments));
  const disks = specs.map((_, at) => join(folder, `disk${at}`));
  for (const disk of disks) {
    writeFileSync(disk, '');
    truncateSync(disk, DISK_MIB * MIB);
    must('mkfs.ext4', ['-q', '-O', '^has_journal', disk]);
  }
  must('sync', []);
  for (const path of [...site.layer, ...disks]) dropCached(path);
  const machines: RunningVm[] = [];
  const said: string[] = [];
  const samples: Sample[] = [];
  let cpuSeconds = 0;
  try {
    const ready: Promise<void>[] = [];
    const done: Promise<void>[] = [];
    for (const spec of specs) {
      mkdirSync(spec.folder, { mode: 0o700 });
      const vm = await driver.start(spec);
      machines.push(vm);
      const lines = linesOf(vm, said);
      ready.push(lines.until('ready'));
      done.push(lines.until('done'));
    }
    await Promise.all(ready);
    const files = { memory: specs.map(({ memoryFile }) => memoryFile), layers: site.layer, disks };
    const pids = machines.map(({ pid }) => pid);
    const started = performance.now();
    const cpuBefore = cpuOf(pids);
    let ended = false;
    const all = Promise.all(done).finally(() => {
      ended = true;
    });
    while (!ended) {
      samples.push({ seconds: (performance.now() - started) / 1000, ...hostMemory(pids, files) });
      cpuSeconds = Math.max(cpuSeconds, cpuOf(pids) - cpuBefore);
      await Promise.race([all, delay(SAMPLE_MS)]);
    }
    await all;
  } finally {
    await Promise.all(machines.map((vm) => vm.kill()));
    rmSync(folder, { recursive: true, force: true });
  }
  const totals = samples.map(totalBytes);
  console.log(`${name}: peak ${Math.round(Math.max(...totals) / MIB)} MiB, ${round(cpuSeconds)} s of processor time`);
  for (const line of said.filter((one) => /idle|done|failed|module/.test(one)).slice(0, 4)) console.log(`  ${line}`);
  return { name, samples, peak: Math.max(...totals), mean: meanOf(samples, totalBytes), cpuSeconds, said };
}

function guestSpec(site: Site, folder: string, at: number, memory: GuestMemory, clock: string): VmSpec {
  const drive = (id: string, file: string, readOnly: boolean, transport: VmDrive['transport']): VmDrive => ({
    id,
    source: { file },
    readOnly,
    transport,
  });
  const [metadata, data] = site.layer;
  // One on pmem in any case, so that all variants are the same kind of machine.
  const none = join(site.folder, 'empty');
  writeFileSync(none, '');
  truncateSync(none, 2 * MIB);
  const drives = memory.pmem
    ? [drive('meta', metadata, true, 'pmem'), drive('data', data, true, 'pmem')]
    : [drive('none', none, true, 'pmem'), drive('meta', metadata, true, 'blk'), drive('data', data, true, 'blk')];
  const phases = {
    damon: memory.damon ? 1 : 0,
    delay: at * STAGGER_S,
    rounds: ROUNDS,
    build: BUILD_MIB,
    write: WRITE_MIB,
    think: THINK_S,
    idle: IDLE_S,
  };
  const places = memory.pmem
    ? { metadata: '/dev/pmem0', data: '/dev/pmem1', disk: '/dev/vda', options: ',dax=always' }
    : { metadata: '/dev/vda', data: '/dev/vdb', disk: '/dev/vdc' };
  const words = Object.entries({ ...phases, ...places }).map(([name, value]) => `density.${name}=${value}`);
  const commandLine = ['console=ttyS0 quiet panic=-1', clock, ...memoryKernelArguments(memory), ...words].join(' ');
  return {
    id: `density-${at}`,
    folder: join(folder, `vm${at}`),
    boot: { kernel: site.kernel, initrd: site.initrd, commandLine },
    cpus: 1,
    memoryBytes: GUEST_MIB * MIB,
    memoryFile: `/dev/shm/dsec-density-${process.pid}-${at}`,
    drives: [...drives, drive('disk', join(folder, `disk${at}`), false, 'blk')],
    balloon: { freePageReporting: memory.reporting },
  };
}

/** What a guest says, line by line. */
function linesOf(vm: RunningVm, said: string[]): { until(word: string): Promise<void> } {
  const waiting = new Map<string, () => void>();
  const heard = new Set<string>();
  let rest = '';
  let failed: (error: Error) => void = () => {};
  const failure = new Promise<never>((_resolve, reject) => {
    failed = reject;
  });
  failure.catch(() => {});
  const take = (bytes: Buffer) => {
    const lines = (rest + bytes.toString('latin1')).split('\n');
    rest = lines.pop()!;
    for (const line of lines) {
      const text = /density: (.*)/.exec(line)?.[1]?.trim();
      if (text === undefined) continue;
      said.push(text);
      const word = text.split(' ')[0]!;
      if (word === 'failed') failed(new Error(`a guest: ${text}`));
      heard.add(word);
      waiting.get(word)?.();
    }
  };
  take(vm.console.recent());
  vm.console.follow(take);
  vm.ended.then(({ detail }) => failed(new Error(`a guest has ended: ${detail}`)));
  return {
    until(word) {
      const told = new Promise<void>((resolve) => {
        if (heard.has(word)) resolve();
        else waiting.set(word, resolve);
      });
      const late = delay(GUEST_MS, undefined, { ref: false }).then(() => {
        throw new Error(`a guest has not said "${word}": ${rest}`);
      });
      return Promise.race([told, failure, late]);
    },
  };
}

/** Seconds that processes have had, of those that are there. */
function cpuOf(pids: readonly number[]): number {
  let ticks = 0;
  for (const pid of pids) {
    try {
      const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
      const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
      ticks += Number(fields[11]) + Number(fields[12]);
    } catch {
      // It has ended.
    }
  }
  return ticks / 100;
}

/** Over time: the integral divided by its length. */
export function meanOf(samples: readonly Sample[], of: (sample: Sample) => number): number {
  let area = 0;
  for (let i = 1; i < samples.length; i++) {
    const [before, after] = [samples[i - 1]!, samples[i]!];
    area += ((of(before) + of(after)) / 2) * (after.seconds - before.seconds);
  }
  return area / (samples.at(-1)!.seconds - samples[0]!.seconds);
}
