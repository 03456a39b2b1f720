/**
 * From the command line to the first byte of a container's output: `dsec run IMAGE -- echo` against `docker run` of the same
 * image, local and warm on both sides. Neither gives the container a network; the time to the end is reported too.
 */
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result } from './benchmark.ts';
import { DOCKER_MISSING, DockerDaemon, haveDocker } from './docker-daemon.ts';
import { DsecCommand } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { numberOption } from './options.ts';
import { saveFigure } from './results.ts';
import { inTurn, summary } from './sample.ts';
import { BUSYBOX_MISSING, findBusybox, writeSmallImage } from './small-image.ts';
import { timedCommand } from './timed-command.ts';
import { missingTool, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

const TARGET = 5;
const COMMAND = ['/bin/echo', 'hello'];

export const benchmark: Benchmark = {
  name: 'run-first-output',
  about: 'dsec run to the first output, against docker run of the same local image',
  needs: () =>
    needsRoot() ??
    (haveDocker() ? undefined : DOCKER_MISSING) ??
    missingTool({ skopeo: 'skopeo', crun: 'crun' }) ??
    (findBusybox() === undefined ? BUSYBOX_MISSING : undefined),
  run: () => withScratch('run', measure),
};

async function measure(folder: string): Promise<Result> {
  const { layout } = await writeSmallImage(folder);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`oci:${layout}`, 'small:1');
  const docker = await DockerDaemon.start(join(folder, 'd'));
  try {
    await docker.load(layout, 'small:1');
    const toEnd = { dsec: [] as number[], docker: [] as number[] };
    const ours = async () => {
      const { ms, firstOutputMs } = await dsec.run(['run', 'small:1', '--', ...COMMAND]);
      toEnd.dsec.push(ms);
      return firstOutputMs!;
    };
    const theirs = async () => {
      const { ms, firstOutputMs } = await timedCommand(
        docker.argv(['run', '--rm', '--network=none', 'small:1', ...COMMAND]),
      );
      toEnd.docker.push(ms);
      return firstOutputMs!;
    };
    for (let i = 0; i < 2; i++) {
      await ours();
      await theirs();
    }
    toEnd.dsec.length = 0;
    toEnd.docker.length = 0;
    const n = numberOption('n', 15);
    const pairs = await inTurn(n, ours, theirs);
    const [own, peer] = [summary(pairs.ours), summary(pairs.theirs)];
    const [ownEnd, peerEnd] = [summary(toEnd.dsec), summary(toEnd.docker)];
    console.log(
      `first output: dsec ${own.p50} ms, docker ${peer.p50} ms; to the end: ${ownEnd.p50} and ${peerEnd.p50} ms`,
    );
    const figure = saveFigure(
      'run-first-output',
      barChart({
        title: 'From the command line to a container’s first output: median',
        unit: 'ms',
        series: ['dsec run', `docker run ${docker.version}`],
        groups: [
          { label: 'first output', values: [own.p50, peer.p50] },
          { label: 'ended', values: [ownEnd.p50, peerEnd.p50] },
        ],
      }),
    );
    return {
      ratio: pairs.ratio,
      ...atLeast(TARGET, pairs.ratio),
      against: `docker run --rm --network=none, dockerd ${docker.version}, overlay2`,
      n,
      p50: own.p50,
      p99: own.p99,
      unit: 'ms',
      docker: peer,
      toEnd: { dsec: ownEnd, docker: peerEnd },
      figure,
    };
  } finally {
    await docker.stop();
  }
}
