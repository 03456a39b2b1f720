/**
 * Machines from snapshots against machines that boot: how long until a shell answers, by cold boot and from the warm pool (memory shared with the
 * snapshot, copied when written); and how long a pause and a resume take, against what the guest has in memory. Promised: warm in a fifth of cold.
 * Emulated (no KVM) only the ratios mean something.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { openQemuDriver } from '#runtime';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { lineChart } from './figures/svg.ts';
import { numberOption } from './options.ts';
import { printTable, saveFigure } from './results.ts';
import { median } from './sample.ts';
import { said, shell, shellArchive, shellSpec } from './shell-guest.ts';

const SIZES_MIB = [128, 256, 512];
/** What the guest has in memory of itself, and a margin. */
const SYSTEM_MIB = 112;
const PROMISED = 0.2;

export const benchmark: Benchmark = {
  name: 'vm-snapshot',
  about: 'a machine from the warm pool against one that boots; pause and resume against memory in use',
  needs: () => (process.getuid?.() === 0 ? undefined : 'needs root'),
  run,
};

/** Not zeros, which take no room; and few random numbers, which an emulated processor takes minutes for. */
function fill(mib: number): string {
  return `head -c 1m /dev/urandom > /tmp/seed; for i in $(seq ${mib}); do cat /tmp/seed; done > /tmp/data`;
}

async function run(): Promise<Result> {
  const n = numberOption('n', 2);
  const folder = await mkdtemp(join(tmpdir(), 'dsec-bench-vm-'));
  const driver = openQemuDriver();
  const initrd = shellArchive(folder);
  let count = 0;
  const spec = (mib: number) => shellSpec(folder, `m${++count}`, initrd, mib);
  const timed = async <T>(work: () => Promise<T>): Promise<[T, number]> => {
    const began = performance.now();
    return [await work(), performance.now() - began];
  };
  try {
    const cold: number[] = [];
    const warm: number[] = [];
    const rows: { mib: number; usedMib: number; pause: number; again: number; resume: number; layer: number }[] = [];
    for (const mib of SIZES_MIB) {
      const boot = async () => {
        const vm = await driver.start(spec(mib));
        await said(vm, 'guest-is-ready');
        await shell(vm, 'true');
        return vm;
      };
      const [vm, bootMs] = await timed(boot);
      if (mib === SIZES_MIB[0]) cold.push(bootMs);
      await shell(vm, fill(mib - SYSTEM_MIB));
      const base = join(folder, `base-${mib}`);
      const [facts, pause] = await timed(() => vm.snapshot(base));
      await vm.kill();
      const from = async (snapshot: string, memory: 'copied' | 'private') => {
        const made = await driver.restore(spec(mib), snapshot, { memory });
        await made.cont();
        await shell(made, 'true');
        return made;
      };
      const [resumed, resume] = await timed(() => from(base, 'copied'));
      const [, again] = await timed(() => resumed.snapshot(join(folder, `again-${mib}`), { base }));
      await resumed.kill();
      rows.push({
        mib,
        usedMib: (facts.changedPages * 4096) / 2 ** 20,
        pause,
        again,
        resume,
        layer: facts.memoryLayerBytes,
      });
      if (mib !== SIZES_MIB[0]) continue;
      for (let at = 0; at < n; at++) {
        const [one, coldMs] = await timed(boot);
        cold.push(coldMs);
        const clean = join(folder, `clean-${at}`);
        await one.snapshot(clean);
        await one.kill();
        // The first of a snapshot reads its memory; the pool has done that before.
        await (await from(clean, 'private')).kill();
        const [made, warmMs] = await timed(() => from(clean, 'private'));
        warm.push(warmMs);
        await made.kill();
        driver.forgetSnapshot(clean);
      }
    }
    printTable([
      ['memory', 'in use', 'pause', 'pause again', 'resume'],
      ...rows.map(({ mib, usedMib, pause, again, resume }) => [
        `${mib} MiB`,
        `${usedMib.toFixed(0)} MiB`,
        `${pause.toFixed(0)} ms`,
        `${again.toFixed(0)} ms`,
        `${resume.toFixed(0)} ms`,
      ]),
    ]);
    printTable([
      ['until a shell answers', ''],
      ['cold boot', `${median(cold).toFixed(0)} ms`],
      ['warm pool', `${median(warm).toFixed(0)} ms`],
    ]);
    const line = (label: string, of: (row: (typeof rows)[number]) => number) => ({
      label,
      points: rows.map((row) => [Math.round(row.usedMib), of(row)] as const),
    });
    const figure = saveFigure(
      'vm-snapshot',
      lineChart({
        title: 'Pausing and resuming a machine',
        xLabel: 'MiB of memory in use',
        yLabel: 'ms',
        series: [
          line('pause', (row) => row.pause),
          line('pause again', (row) => row.again),
          line('resume', (row) => row.resume),
        ],
      }),
    );
    const ratio = round(median(warm) / median(cold));
    return {
      ratio,
      ...atMost(PROMISED, ratio),
      against: `cold boot of the same machine (${driver.features.accelerator})`,
      n,
      p50: round(median(warm)),
      p99: round(Math.max(...warm)),
      unit: 'ms',
      figure,
    };
  } finally {
    for (let at = 1; at <= count; at++) await driver.sweep(join(folder, `m${at}`));
    await rm(folder, { recursive: true, force: true });
  }
}
