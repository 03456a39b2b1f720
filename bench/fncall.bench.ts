/**
 * A short Python task by FnCall, over HTTP: in a fork of an interpreter that waits, and in one that starts for it; against starting a container of the
 * same image for it by our own launcher, through the runtime service. Then as many calls a second as four callers get.
 *
 *     npm run bench -- fncall --fusion=http://127.0.0.1:8080    the same tasks at a SandboxFusion server, too
 */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { fillPythonRoot, pythonMissing } from './python-root.ts';
import { RuntimeServiceProcess } from './runtime-service.ts';
import { summary } from './sample.ts';
import { agentMissing, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

const CODE = 'print(sum(map(int, input().split())))';
const STDIN = '1 2 3';
const AT_ONCE = 4;
const TARGET = 10;

export const benchmark: Benchmark = {
  name: 'fncall',
  about: 'a warm Python task by FnCall against starting a container for it; tasks a second',
  needs: () => needsRoot() ?? agentMissing() ?? pythonMissing(),
  run: () => withScratch('fncall', measure),
};

async function measure(folder: string): Promise<Result> {
  const tree = join(folder, 'tree');
  fillPythonRoot(tree);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`dir:${tree}`, 'python:1');
  const n = numberOption('n', 100);

  const service = await RuntimeServiceProcess.start(dsec);
  const container: number[] = [];
  try {
    const run = () => service.run(['run', 'python:1', '--', 'python3', '-c', 'print(6)']);
    await run();
    for (let i = 0; i < n; i++) container.push((await run()).ms);
  } finally {
    await service.stop();
  }

  const options = [
    '--image',
    'python:1',
    '--floor',
    '2',
    '--ceiling',
    '4',
    '--python',
    '--listen',
    '127.0.0.1:0',
    '--log-level',
    'error',
  ];
  const child = spawn(dsec.program, ['serve', 'fncall', ...options], {
    env: dsec.env,
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  try {
    const url = await listening(child.stdout);
    const ours = (warm: boolean) => () =>
      ask(`${url}/v1/fncall/run`, { language: 'python', code: CODE, stdin: STDIN, warm });
    const warm = await inTurn(n, ours(true));
    const cold = await inTurn(n, ours(false));
    const perSecond = await rate(n * 4, ours(true));
    const perSecondCold = await rate(n, ours(false));
    const { p50, p99 } = summary(warm);
    const started = summary(container);
    const ratio = round(started.p50 / p50);
    const fusion = await measureFusion(
      process.argv.find((word) => word.startsWith('--fusion='))?.slice('--fusion='.length),
      n,
    );
    console.log(
      `warm ${p50} ms, cold ${summary(cold).p50} ms, a container ${started.p50} ms; a second: ${perSecond} warm, ${perSecondCold} cold`,
    );
    return {
      ratio,
      ...atLeast(TARGET, ratio),
      against: 'dsec run python:1 -- python3 -c, through dsec serve runtime',
      n,
      p50,
      p99,
      unit: 'ms',
      coldP50: summary(cold).p50,
      containerP50: started.p50,
      perSecond,
      perSecondCold,
      fusion,
    };
  } finally {
    child.kill('SIGTERM');
    await once(child, 'exit');
  }
}

async function measureFusion(url: string | undefined, n: number): Promise<object | undefined> {
  if (url === undefined) return undefined;
  const run = () => ask(`${url}/run_code`, { language: 'python', code: CODE, stdin: STDIN });
  const ms = await inTurn(n, run);
  return { p50: summary(ms).p50, perSecond: await rate(n, run) };
}

async function listening(stream: NodeJS.ReadableStream): Promise<string> {
  let said = '';
  for await (const bytes of stream) {
    said += bytes;
    const url = /fncall at (\S+)/.exec(said)?.[1];
    if (url !== undefined) return url;
  }
  throw new Error(`dsec serve fncall has ended: ${said}`);
}

async function ask(url: string, body: object): Promise<void> {
  const headers = { 'content-type': 'application/json' };
  const answer = await fetch(url, { method: 'POST', headers, body: JSON.stringify(body) });
  const text = await answer.text();
  // What is fast and wrong counts for nothing.
  if (!text.includes('6\\n')) throw new Error(`${answer.status} ${text}`);
}

async function inTurn(n: number, run: () => Promise<void>): Promise<number[]> {
  await run();
  const ms: number[] = [];
  for (let i = 0; i < n; i++) {
    const from = performance.now();
    await run();
    ms.push(performance.now() - from);
  }
  return ms;
}

async function rate(n: number, run: () => Promise<void>): Promise<number> {
  let left = n;
  const from = performance.now();
  const worker = async () => {
    while (left-- > 0) await run();
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  return round((n / (performance.now() - from)) * 1000);
}
