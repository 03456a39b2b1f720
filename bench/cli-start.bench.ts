/**
 * How long `dsec` takes from being started to having ended, for commands that load least and for those that read an image, against
 * Node alone, which nothing of it can be faster than, and a CLI that is a compiled program.
 */
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, summary } from './sample.ts';
import { timedCommand } from './timed-command.ts';
import { findTool } from './tool.ts';
import { withScratch } from './work-folder.ts';

/** "It starts in about 200 ms": what is more than a fifth above that is not. */
const PROMISED_MS = 200;
const ABOUT = 1.2;

export const benchmark: Benchmark = {
  name: 'cli-start',
  about: 'dsec from its start to its end, against node -e 0 and skopeo --version',
  run: () => withScratch('cli-start', measure),
};

async function measure(folder: string): Promise<Result> {
  const dsec = new DsecCommand(folder);
  const tree = join(folder, 'tree');
  mkdirSync(tree);
  writeFileSync(join(tree, 'file'), 'content');
  await dsec.convert(`dir:${tree}`, 'image:1');
  await dsec.warmUp();
  const commands = [['--version'], ['images'], ['ls', 'image:1']];
  const n = numberOption('n', 20);
  const node = [process.execPath, '-e', '0'];
  const rows = [];
  for (const args of commands) {
    let cpuMs = 0;
    const ours = async () => {
      const measured = await dsec.run(args);
      cpuMs += measured.cpuMs;
      return measured.ms;
    };
    // Once before it counts: what it reads is in the page cache then.
    await ours();
    cpuMs = 0;
    const pairs = await inTurn(n, ours, async () => (await timedCommand(node)).ms);
    const { p50, p99 } = summary(pairs.ours);
    rows.push({
      command: args.join(' '),
      p50,
      p99,
      cpuMs: round(cpuMs / n),
      nodeP50: summary(pairs.theirs).p50,
      ratio: round(1 / pairs.ratio),
    });
  }
  const skopeo = findTool('skopeo');
  const skopeoMs = skopeo === undefined ? undefined : await medianOf(n, [skopeo, '--version']);
  printTable([
    ['dsec', 'ms', 'p99', 'CPU ms', 'node -e 0', 'times as long'],
    ...rows.map((row) => [row.command, row.p50, row.p99, row.cpuMs, row.nodeP50, row.ratio]),
  ]);
  console.log(skopeoMs === undefined ? 'skopeo is not here' : `skopeo --version: ${skopeoMs} ms`);
  const slowest = Math.max(...rows.map(({ p50 }) => p50));
  const ratio = round(slowest / PROMISED_MS);
  return {
    ratio,
    ...atMost(ABOUT, ratio),
    against: `${PROMISED_MS} ms, for the slowest of ${rows.map(({ command }) => command).join(', ')}`,
    n,
    p50: slowest,
    p99: Math.max(...rows.map(({ p99 }) => p99)),
    unit: 'ms',
    timesNode: Math.max(...rows.map((row) => row.ratio)),
    skopeoMs,
    rows,
  };
}

async function medianOf(n: number, argv: readonly string[]): Promise<number> {
  const sample: number[] = [];
  for (let i = 0; i < n; i++) sample.push((await timedCommand(argv)).ms);
  return summary(sample).p50;
}
