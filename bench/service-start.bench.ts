/**
 * What `dsec serve runtime` costs until it answers, beside `dsec --version`, which loads the program and no more: processor time, since what else the
 * machine does says nothing about either.
 */
import { mkdirSync, readFileSync } from 'node:fs';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { RuntimeServiceProcess } from './runtime-service.ts';
import { inTurn, summary } from './sample.ts';
import { agentMissing, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

/** Loading what serves, and opening it; compiling all its routes' schemas would be as much again. */
const TIMES = 4;

export const benchmark: Benchmark = {
  name: 'service-start',
  about: 'processor time of dsec serve runtime until it answers, against dsec --version',
  needs: () => needsRoot() ?? agentMissing(),
  run: () => withScratch('service-start', measure),
};

async function measure(folder: string): Promise<Result> {
  const dsec = new DsecCommand(folder);
  mkdirSync(dsec.env.DSEC_RUN!, { recursive: true });
  await dsec.warmUp();
  const starts = async () => {
    const service = await RuntimeServiceProcess.start(dsec);
    const cpuMs = cpuMsOf(service.pid);
    await service.stop();
    return cpuMs;
  };
  const n = numberOption('n', 10);
  await starts();
  const pairs = await inTurn(n, starts, async () => (await dsec.run(['--version'])).cpuMs);
  const ratio = round(1 / pairs.ratio);
  const { p50, p99 } = summary(pairs.ours);
  return { ratio, ...atMost(TIMES, ratio), against: 'dsec --version', n, p50, p99, unit: 'ms' };
}

/** Clock ticks are 10 ms on every Linux that Node runs on. */
function cpuMsOf(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8')
    .replace(/^.*\) /s, '')
    .split(' ');
  return (Number(fields[11]) + Number(fields[12])) * 10;
}
