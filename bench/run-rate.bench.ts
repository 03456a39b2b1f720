/**
 * `dsec run` of `true` from beginning to end, as many a second as two at a time give: through the runtime service, alone with our
 * launcher, and alone with crun, all over the same local image.
 */
import { type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { RuntimeServiceProcess } from './runtime-service.ts';
import { summary } from './sample.ts';
import { busyboxMissing, writeSmallImage } from './small-image.ts';
import { type Measured, timedCommand } from './timed-command.ts';
import { agentMissing, missingTool, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

const AT_ONCE = 2;
const WARM_UP_RUNS = 20;

export const benchmark: Benchmark = {
  name: 'run-rate',
  about: 'sandboxes a second, begun and undone: through the service, alone, and alone with crun',
  needs: () => needsRoot() ?? missingTool({ crun: 'crun' }) ?? agentMissing() ?? busyboxMissing(),
  run: () => withScratch('rate', measure),
};

interface Rate {
  readonly perSecond: number;
  readonly cpuMs: number;
  readonly ms: number[];
}

async function measure(folder: string): Promise<Result> {
  const { layout } = await writeSmallImage(folder);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`oci:${layout}`, 'small:1');
  const n = numberOption('n', 40);
  const alone = (runtime: string) => () =>
    timedCommand([dsec.program, 'run', '--runtime', runtime, 'small:1', '--', '/bin/true'], { env: dsec.env });
  const crun = await rateOf(n, alone('crun'));
  const own = await rateOf(n, alone('dsec'));
  const service = await RuntimeServiceProcess.start(dsec);
  try {
    const through = () => service.run(['run', 'small:1', '--', '/bin/true']);
    for (let i = 0; i < WARM_UP_RUNS; i++) await through();
    const served = await rateOf(n * 3, through);
    console.log(
      `a second: ${served.perSecond} through the service, ${own.perSecond} alone, ${crun.perSecond} alone with crun`,
    );
    const { p50, p99 } = summary(served.ms);
    return {
      ratio: round(served.perSecond / crun.perSecond),
      target: undefined,
      met: undefined,
      against: 'dsec run --runtime crun, a process each',
      n,
      p50,
      p99,
      unit: 'ms',
      perSecond: { service: served.perSecond, alone: own.perSecond, crun: crun.perSecond },
      atOnce: AT_ONCE,
    };
  } finally {
    await service.stop();
  }
}

async function rateOf(n: number, run: () => Promise<Measured>): Promise<Rate> {
  await run();
  const ms: number[] = [];
  let cpuMs = 0;
  let left = n;
  const startedAt = performance.now();
  const worker = async () => {
    while (left-- > 0) {
      const measured = await run();
      ms.push(measured.ms);
      cpuMs += measured.cpuMs;
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  return { perSecond: round((n / (performance.now() - startedAt)) * 1000), cpuMs, ms };
}
