/**
 * All that kept 500 sandboxes is killed, service and keeper: how long until the next service has reclaimed their mounts, control groups and
 * records, and how long a new sandbox takes meanwhile.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { listSandboxes } from '#runtime';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { summary } from './sample.ts';
import { SandboxHost, sandboxesMissing } from './sandbox-host.ts';
import { writeSmallImage } from './small-image.ts';
import { withScratch } from './work-folder.ts';

const COUNT = 500;
/** 5 s for 500. */
const TARGET_MS_EACH = 10;
const AT_ONCE = 4;

export const benchmark: Benchmark = {
  name: 'sandbox-reclaim',
  about: 'what 500 sandboxes left whose service and keeper were killed, reclaimed while others are made',
  needs: sandboxesMissing,
  run: () => withScratch('reclaim', measure),
};

async function measure(folder: string): Promise<Result> {
  const { layout } = await writeSmallImage(folder);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`oci:${layout}`, 'small:1');
  const count = numberOption('n', COUNT);
  const first = await SandboxHost.start(dsec);
  let left = count;
  const make = async () => {
    while (left-- > 0) await first.create('small:1');
  };
  await Promise.all(Array.from({ length: AT_ONCE }, make));
  const { keeperPid } = first;
  await first.service.kill();
  process.kill(keeperPid, 'SIGKILL');
  const second = await SandboxHost.start(dsec);
  try {
    const startedAt = performance.now();
    const folders = { stateDir: dsec.env.DSEC_STATE!, runDir: dsec.env.DSEC_RUN!, cacheDir: dsec.env.DSEC_CACHE! };
    let doneMs: number | undefined;
    const served: number[] = [];
    const serve = async () => {
      while (doneMs === undefined || served.length === 0) {
        const askedAt = performance.now();
        const name = await second.create('small:1', { name: `meanwhile-${served.length}` });
        await second.exec(name, ['/bin/true']);
        served.push(performance.now() - askedAt);
        await second.remove(name);
      }
    };
    const watch = async () => {
      const isStale = ({ name, state }: { name: string; state: string }) =>
        name.startsWith('bench-') && state === 'running';
      while (listSandboxes(folders).some(isStale)) await sleep(50);
      doneMs = performance.now() - startedAt;
    };
    await Promise.all([serve(), watch()]);
    const meanwhile = summary(served);
    console.log(
      `${count} reclaimed after ${round(doneMs!)} ms; a sandbox with a command meanwhile: ${meanwhile.p50} ms`,
    );
    const targetMs = count * TARGET_MS_EACH;
    const over = doneMs! / targetMs;
    return {
      ratio: round(over),
      ...atMost(1, over),
      against: `${targetMs} ms for ${count}`,
      n: count,
      p50: round(doneMs!),
      p99: round(doneMs!),
      unit: 'ms',
      meanwhile,
    };
  } finally {
    await second.stop();
  }
}
