/**
 * A short Python task by FnCall over HTTP, in a fork of an interpreter that waits and in one that starts for it, against what is done without FnCall:
 *
 * - a sandbox of ours for it over HTTP: create, one command `python3 -c`, its output. The main peer: same image, same service, same transport, and the
 *   quickest way to a container that is known here. Its removal is not counted, as cleaning after a task is not; `removed` has it with that;
 * - `dsec run`, and `docker run` where there is a dockerd: as they are typed.
 *
 * Then as many calls a second as four callers get, with the processor time of one call: that says more where the machine does other work too.
 *
 *     npm run bench -- fncall --fusion=http://127.0.0.1:8080    the same tasks at a SandboxFusion server, too
 */
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { DockerDaemon, dockerMissing } from './docker-daemon.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { treeCpuMs } from './process-tree.ts';
import { fillPythonRoot, pythonMissing } from './python-root.ts';
import { RawConnection } from './raw-http-client.ts';
import { summary } from './sample.ts';
import { compareWithFusion, type FusionComparison, rate } from './sandbox-fusion.ts';
import { SandboxHost } from './sandbox-host.ts';
import { withFnCallServer } from './serve-fncall.ts';
import { timedCommand } from './timed-command.ts';
import { agentMissing, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

const CODE = 'print(sum(map(int, input().split())))';
const STDIN = '1 2 3';
const COMMAND = ['python3', '-c', 'print(sum(map(int, "1 2 3".split())))'];
const AT_ONCE = 4;
const TARGET = 10;

export const benchmark: Benchmark = {
  name: 'fncall',
  about: 'a warm Python task by FnCall against a container for it: a sandbox, dsec run, docker run; tasks a second',
  needs: () => needsRoot() ?? agentMissing() ?? pythonMissing(),
  run: () => withScratch('fncall', measure),
};

async function measure(folder: string): Promise<Result> {
  const tree = join(folder, 'tree');
  fillPythonRoot(tree);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`dir:${tree}`, 'python:1');
  const n = numberOption('n', 100);
  const few = Math.min(n, 20);
  const docker = await measureDocker(folder, tree, few);
  const peers = await measurePeers(dsec, n, few);
  const options = ['--image', 'python:1', '--floor', '2', '--ceiling', '4', '--python'];
  const measured = await withFnCallServer(dsec, options, async ({ url, pid }) => {
    const caller = (warm: boolean) => connection(`${url}/v1/fncall/run`, { warm });
    const [warmCaller, coldCaller] = [await caller(true), await caller(false)];
    const warm = await inTurn(n, warmCaller);
    const cold = await inTurn(few, coldCaller);
    const before = treeCpuMs(pid);
    const perSecond = await rate(n * 4, await Promise.all(Array.from({ length: AT_ONCE }, () => caller(true))));
    const cpuMs = round((treeCpuMs(pid) - before) / (n * 4));
    const perSecondCold = await rate(n, await Promise.all(Array.from({ length: AT_ONCE }, () => caller(false))));
    return { warm: summary(warm), cold: summary(cold), perSecond, cpuMs, perSecondCold };
  });
  const { warm, cold, perSecond, cpuMs, perSecondCold } = measured;
  const { p50, p99 } = warm;
  const ratio = round(peers.sandbox / p50);
  const ratios = Object.fromEntries(
    Object.entries({ ...peers, docker }).map(([name, ms]) => [name, ms === undefined ? undefined : round(ms / p50)]),
  );
  console.log(
    `warm ${p50} ms, cold ${cold.p50} ms; a sandbox ${peers.sandbox} ms (with its removal ${peers.removed}), dsec run ${peers.run} ms, ` +
      `docker run ${docker ?? 'not measured'}; a second: ${perSecond} warm (${cpuMs} ms of processor time each), ${perSecondCold} cold`,
  );
  const fusionUrl = process.argv.find((word) => word.startsWith('--fusion='))?.slice('--fusion='.length);
  const fusion = fusionUrl === undefined ? undefined : await compareWithFusion(fusionUrl, dsec, folder, n);
  return {
    ratio,
    ...atLeast(TARGET, ratio),
    against: `a sandbox of the same image over HTTP, for one python3 -c${fusion === undefined ? '; no SandboxFusion server was given (--fusion=URL)' : ''}`,
    n,
    p50,
    p99,
    unit: 'ms',
    coldP50: cold.p50,
    sandboxP50: peers.sandbox,
    sandboxRemovedP50: peers.removed,
    dsecRunP50: peers.run,
    dockerRunP50: docker,
    ratios,
    perSecond,
    cpuMs,
    perSecondCold,
    ...(fusion !== undefined && flatFusion(fusion)),
    fusion,
  };
}

/** `fusionPython: { p50, perSecond2, perSecond4, cpu, wrong }`: theirs to ours, calls a second ours to theirs. */
function flatFusion(fusion: FusionComparison): Record<string, Record<string, number>> {
  return Object.fromEntries(
    Object.entries(fusion).map(([language, { ratio, wrong }]) => [
      `fusion${language.charAt(0).toUpperCase()}${language.slice(1)}`,
      {
        p50: ratio.p50,
        ...Object.fromEntries(
          Object.entries(ratio.perSecond).map(([clients, value]) => [`perSecond${clients}`, value]),
        ),
        cpu: ratio.cpu,
        wrong,
      },
    ]),
  );
}

interface Peers {
  readonly sandbox: number;
  readonly removed: number;
  readonly run: number;
}

async function measurePeers(dsec: DsecCommand, n: number, few: number): Promise<Peers> {
  const host = await SandboxHost.start(dsec);
  const [answered, removed]: number[][] = [[], []];
  try {
    for (let i = -1; i < n; i++) {
      const from = performance.now();
      const name = await host.create('python:1', { network: { mode: 'none' } });
      right(await host.exec(name, COMMAND));
      const told = performance.now();
      await host.remove(name);
      // The first one fetches.
      if (i < 0) continue;
      answered!.push(told - from);
      removed!.push(performance.now() - from);
    }
    const run: number[] = [];
    for (let i = -1; i < few; i++) {
      const { ms, stdout } = await host.service.run(['run', 'python:1', '--', ...COMMAND]);
      right(stdout);
      if (i >= 0) run.push(ms);
    }
    return { sandbox: summary(answered!).p50, removed: summary(removed!).p50, run: summary(run).p50 };
  } finally {
    await host.stop();
  }
}

/** The p50 of `docker run`; undefined where there is no dockerd. */
async function measureDocker(folder: string, tree: string, n: number): Promise<number | undefined> {
  const missing = dockerMissing();
  if (missing !== undefined) {
    console.log(`docker run is not measured: ${missing}`);
    return undefined;
  }
  const docker = await DockerDaemon.start(join(folder, 'docker'));
  try {
    const load = docker.argv(['import', '-', 'python:1']).join(' ');
    await timedCommand(['sh', '-c', `tar -C ${tree} -c . | ${load}`]);
    const ms: number[] = [];
    for (let i = -1; i < n; i++) {
      const run = await timedCommand(docker.argv(['run', '--rm', '--network=none', 'python:1', ...COMMAND]));
      right(run.stdout);
      if (i >= 0) ms.push(run.ms);
    }
    return summary(ms).p50;
  } finally {
    await docker.stop();
  }
}

/** Of a caller whose connection stays. */
async function connection(url: string, more: object): Promise<() => Promise<void>> {
  const body = JSON.stringify({ language: 'python', code: CODE, stdin: STDIN, ...more });
  const headers = { 'content-type': 'application/json' };
  const { pathname } = new URL(url);
  const caller = await RawConnection.open(url, { method: 'POST', path: pathname, headers, body });
  return async () => {
    const status = await caller.ask();
    if (status !== 200 || !caller.text().includes('6\\n')) throw new Error(caller.text());
  };
}

/** What is fast and wrong counts for nothing. */
function right(output: string): void {
  if (output.trim() !== '6') throw new Error(`a program has answered ${JSON.stringify(output)}`);
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
