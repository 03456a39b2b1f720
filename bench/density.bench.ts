/**
 * Figure 12 of the paper at this machine's size: what sandboxes in virtual machines cost in memory over time. Guests of the same layers do in turn what sandboxes
 * do (start, calls of tools with pauses between them, then nothing), four times: as machines are without measures, with layers on virtio-pmem, with cold pages
 * given up (DAMON) and free ones reported, and with both. Counted is all that the host holds for them, each page once (density/host-memory.ts).
 *
 * Phases have given lengths, and a page is cold after seconds here, not half a minute: the whole of it is a minute, not an hour. Emulated guests (no KVM)
 * have the same memory, but their processes hold translated code too; that is in the sum, and shown beside it.
 */
import { type GuestMemory, openQemuDriver } from '#runtime';
import { type Benchmark, type Result, round } from './benchmark.ts';
import { totalBytes } from './density/host-memory.ts';
import { GUEST_MIB, MIB, meanOf, prepare, type Run, runGuests, type Sample } from './density/run-guests.ts';
import { lineChart } from './figures/svg.ts';
import { LabUnavailable, labKernel } from './lab/kernel.mjs';
import { numberOption } from './options.ts';
import { printTable, saveFigure } from './results.ts';
import { missingTool, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

const PEAK_TARGET = 0.6;
const INTEGRAL_TARGET = 0.79;
const GUESTS = 6;
const VARIANTS: readonly { readonly name: string; readonly memory: GuestMemory }[] = [
  { name: 'baseline', memory: { pmem: false, reporting: false, damon: false } },
  { name: 'pmem', memory: { pmem: true, reporting: false, damon: false } },
  { name: 'reporting', memory: { pmem: false, reporting: true, damon: true } },
  { name: 'both', memory: { pmem: true, reporting: true, damon: true } },
];

export const benchmark: Benchmark = {
  name: 'density',
  about:
    'memory and processor time of guests of the same layers: pmem, reporting with DAMON, both, neither (figure 12 of the paper)',
  needs() {
    try {
      labKernel();
    } catch (error) {
      if (error instanceof LabUnavailable) return error.message;
      throw error;
    }
    return needsRoot() ?? missingTool({ 'qemu-system-x86_64': 'qemu-system-x86' });
  },
  run: () => withScratch('density', measure),
};

async function measure(folder: string): Promise<Result> {
  const site = await prepare(folder);
  const n = Math.max(2, numberOption('n', GUESTS));
  const runs: Run[] = [];
  for (const { name, memory } of VARIANTS) runs.push(await runGuests(site, name, memory, n));
  const [base, , , both] = runs as [Run, Run, Run, Run];
  const ratios = (of: (run: Run) => number) =>
    Object.fromEntries(runs.map((run) => [run.name, round(of(run) / of(base))]));
  const peak = ratios((run) => run.peak);
  const mean = ratios((run) => run.mean);
  const cpu = ratios((run) => run.cpuSeconds);
  // As it would be if the processes took nothing for themselves: emulated ones keep translated code.
  const without = (sample: Sample) => totalBytes(sample) - sample.processes;
  const peakWithout = ratios((run) => Math.max(...run.samples.map(without)));
  const meanWithout = ratios((run) => meanOf(run.samples, without));
  printTable([
    ['MiB', 'peak', 'mean', 'of it guests', 'layers', 'disks', 'processes', 'CPU s'],
    ...runs.map((run) => [
      run.name,
      ...[run.peak, run.mean].map((bytes) => Math.round(bytes / MIB)),
      ...(['guests', 'layerCache', 'diskCache', 'processes'] as const).map((part) =>
        Math.round(meanOf(run.samples, (sample) => sample[part]) / MIB),
      ),
      round(run.cpuSeconds),
    ]),
  ]);
  const figure = saveFigure(
    'density',
    lineChart({
      title: `Host memory of ${n} guests of the same layers`,
      xLabel: 'seconds',
      yLabel: 'MiB',
      series: runs.map((run) => ({
        label: run.name,
        points: run.samples.map((sample) => [round(sample.seconds), round(totalBytes(sample) / MIB)] as const),
      })),
    }),
  );
  const met = peak.both! <= PEAK_TARGET && mean.both! <= INTEGRAL_TARGET;
  return {
    ratio: peak.both,
    target: `peak <= ${PEAK_TARGET}, integral <= ${INTEGRAL_TARGET}`,
    met,
    against: 'the same guests without any of it',
    n: 1,
    guests: n,
    p50: both.mean,
    p99: both.peak,
    unit: 'bytes',
    figure,
    accelerator: openQemuDriver().features.accelerator,
    guestMib: GUEST_MIB,
    peakRatios: peak,
    integralRatios: mean,
    cpuRatios: cpu,
    peakRatiosWithoutProcesses: peakWithout,
    integralRatiosWithoutProcesses: meanWithout,
    peakMib: Object.fromEntries(runs.map((run) => [run.name, Math.round(run.peak / MIB)])),
    meanMib: Object.fromEntries(runs.map((run) => [run.name, Math.round(run.mean / MIB)])),
    cpuSeconds: Object.fromEntries(runs.map((run) => [run.name, round(run.cpuSeconds)])),
  };
}
