/**
 * From asking for a sandbox that stays to the end of its first command, against `docker run` of the same local image, and against bare
 * `crun run` of its files, which needs no daemon: with the image's layers warm (another sandbox has them) and cold (nobody has,
 * and nothing is in the page cache).
 *
 * Ours is asked over HTTP by a program that keeps running, as an SDK does, and by the command line (`dsec sandbox create`, then `exec`).
 * Ending it is not in the time of ours, nor of docker's, whose command is done when its output comes; it is in crun's, and reported for ours.
 */
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { crunBundle } from './crun-bundle.ts';
import { DockerDaemon, dockerMissing } from './docker-daemon.ts';
import { DsecCommand } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { numberOption } from './options.ts';
import { printTable, saveFigure } from './results.ts';
import { inTurn, median, summary } from './sample.ts';
import { SandboxHost, sandboxesMissing } from './sandbox-host.ts';
import { settle } from './settle.ts';
import { writeSmallImage } from './small-image.ts';
import { timedCommand } from './timed-command.ts';
import { missingTool } from './tool.ts';
import { withScratch } from './work-folder.ts';

const OF_DOCKER = 10;
const OF_CRUN = 1;
const COMMAND = ['/bin/echo', 'hello'];
const WARM_UP_RUNS = 30;

export const benchmark: Benchmark = {
  name: 'sandbox-create',
  about: 'a sandbox that stays, to the end of its first command, against docker run and bare crun run',
  needs: () => sandboxesMissing() ?? dockerMissing() ?? missingTool({ skopeo: 'skopeo', crun: 'crun' }),
  run: () => withScratch('create', measure),
};

async function measure(folder: string): Promise<Result> {
  const { layout, layers } = await writeSmallImage(folder);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`oci:${layout}`, 'small:1');
  const crunCommand = crunBundle(
    join(folder, 'crun'),
    layers.map(({ path }) => path),
    COMMAND,
  );
  const docker = await DockerDaemon.start(join(folder, 'd'));
  try {
    await docker.load(layout, 'small:1');
    const host = await SandboxHost.start(dsec);
    try {
      return await compare(host, dsec, docker, crunCommand);
    } finally {
      await host.stop();
    }
  } finally {
    await docker.stop();
  }
}

async function compare(
  host: SandboxHost,
  dsec: DsecCommand,
  docker: DockerDaemon,
  crunCommand: () => string[],
): Promise<Result> {
  const n = numberOption('n', 15);
  const removals: number[] = [];
  const ours = async () => {
    const startedAt = performance.now();
    const name = await host.create('small:1');
    await host.exec(name, COMMAND);
    const ms = performance.now() - startedAt;
    const removedAt = performance.now();
    await host.remove(name);
    removals.push(performance.now() - removedAt);
    return ms;
  };
  let count = 0;
  const byCommand = async () => {
    const name = `command-${count++}`;
    const create = await timedCommand([dsec.program, 'sandbox', 'create', '--name', name, 'small:1'], {
      env: dsec.env,
    });
    const exec = await timedCommand([dsec.program, 'sandbox', 'exec', '-n', name, '--', ...COMMAND], { env: dsec.env });
    await host.remove(name);
    return create.ms + exec.ms;
  };
  const dockerRun = async () => {
    const run = docker.argv(['run', '--rm', '--network=none', 'small:1', ...COMMAND]);
    return (await timedCommand(run)).firstOutputMs!;
  };
  const crunRun = async () => (await timedCommand(crunCommand())).ms;

  const holder = await host.create('small:1');
  for (let i = 0; i < WARM_UP_RUNS; i++) await ours();
  for (let i = 0; i < 2; i++) for (const side of [byCommand, dockerRun, crunRun]) await side();
  removals.length = 0;
  const warm = await inTurn(n, ours, dockerRun, settle);
  const againstCrun = await inTurn(n, ours, crunRun, settle);
  const commands: number[] = [];
  for (let i = 0; i < n; i++) commands.push(await byCommand());
  await host.remove(holder);
  const coldRuns = Math.max(3, Math.round(n / 3));
  const cold = await inTurn(coldRuns, ours, dockerRun, coldCaches);
  const coldCrun = await inTurn(coldRuns, ours, crunRun, coldCaches);

  const [own, peer, bare, line] = [warm.ours, warm.theirs, againstCrun.theirs, commands].map((sample) =>
    summary(sample),
  );
  printTable([
    ['', 'warm ms', 'cold ms'],
    ['dsec, over HTTP', own!.p50, round(median(cold.ours))],
    ['dsec, its commands', line!.p50, '-'],
    [`docker run ${docker.version}`, peer!.p50, round(median(cold.theirs))],
    ['crun run', bare!.p50, round(median(coldCrun.theirs))],
  ]);
  const figure = saveFigure(
    'sandbox-create',
    barChart({
      title: 'From asking for a sandbox to the end of its first command: median',
      unit: 'ms',
      series: ['dsec', `docker run ${docker.version}`, 'crun run'],
      groups: [
        { label: 'layers warm', values: [own!.p50, peer!.p50, bare!.p50] },
        { label: 'cold', values: [cold.ours, cold.theirs, coldCrun.theirs].map((sample) => round(median(sample))) },
      ],
    }),
  );
  const first = atLeast(OF_DOCKER, warm.ratio);
  const met = first.met && cold.ratio >= OF_DOCKER && againstCrun.ratio >= OF_CRUN && coldCrun.ratio >= OF_CRUN;
  return {
    ratio: warm.ratio,
    target: `${first.target}; cold too; crun >= ${OF_CRUN}, cold too`,
    met,
    against: `docker run --rm --network=none, dockerd ${docker.version}, overlay2, to its first output; crun run of the unpacked files`,
    n,
    p50: own!.p50,
    p99: own!.p99,
    unit: 'ms',
    cold: { ratio: cold.ratio, dsec: summary(cold.ours), docker: summary(cold.theirs) },
    crun: { ratio: againstCrun.ratio, ...bare },
    crunCold: { ratio: coldCrun.ratio, ...summary(coldCrun.theirs) },
    docker: peer,
    commandLine: line,
    removeMs: summary(removals),
    figure,
  };
}

function coldCaches(): void {
  settle();
  writeFileSync('/proc/sys/vm/drop_caches', '3');
}
