/**
 * From the command line to the first byte of a container's output: `dsec run IMAGE -- echo` against `docker run` of the same
 * image, local and warm on both sides. Neither gives the container a network; the time to the end is reported too.
 *
 * `docker run` is a client of dockerd, which is up and has the image's layers at hand; so `dsec run` is a client of `dsec serve
 * runtime`, which is up too. `dsec run` without that service, a process that loads and does everything itself, is reported beside it.
 */
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result } from './benchmark.ts';
import { DockerDaemon, dockerMissing } from './docker-daemon.ts';
import { DsecCommand } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { numberOption } from './options.ts';
import { saveFigure } from './results.ts';
import { RuntimeServiceProcess } from './runtime-service.ts';
import { inTurn, summary } from './sample.ts';
import { busyboxMissing, writeSmallImage } from './small-image.ts';
import { type Measured, timedCommand } from './timed-command.ts';
import { agentMissing, missingTool, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

const TARGET = 5;
const COMMAND = ['/bin/echo', 'hello'];
/** The service's code is compiled by the engine as it is used; dockerd's was before. */
const WARM_UP_RUNS = 20;

export const benchmark: Benchmark = {
  name: 'run-first-output',
  about: 'dsec run to the first output, against docker run of the same local image',
  needs: () =>
    needsRoot() ?? dockerMissing() ?? missingTool({ skopeo: 'skopeo' }) ?? agentMissing() ?? busyboxMissing(),
  run: () => withScratch('run', measure),
};

async function measure(folder: string): Promise<Result> {
  const { layout } = await writeSmallImage(folder);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`oci:${layout}`, 'small:1');
  const docker = await DockerDaemon.start(join(folder, 'd'));
  try {
    await docker.load(layout, 'small:1');
    const args = ['run', 'small:1', '--', ...COMMAND];
    const toEnd = { service: [] as number[], alone: [] as number[], docker: [] as number[] };
    const timed = (to: number[], command: () => Promise<Measured>) => async () => {
      const { ms, firstOutputMs } = await command();
      to.push(ms);
      return firstOutputMs!;
    };
    const theirs = timed(toEnd.docker, () =>
      timedCommand(docker.argv(['run', '--rm', '--network=none', 'small:1', ...COMMAND])),
    );
    const n = numberOption('n', 15);
    // While no service is there.
    const alone = timed(toEnd.alone, () => timedCommand([dsec.program, ...args], { env: dsec.env }));
    for (let i = 0; i < 2; i++) await alone();
    toEnd.alone.length = 0;
    const withoutService: number[] = [];
    for (let i = 0; i < Math.min(n, 10); i++) withoutService.push(await alone());
    const service = await RuntimeServiceProcess.start(dsec);
    try {
      const ours = timed(toEnd.service, () => service.run(args));
      for (let i = 0; i < WARM_UP_RUNS; i++) await ours();
      for (let i = 0; i < 2; i++) await theirs();
      toEnd.service.length = 0;
      toEnd.docker.length = 0;
      const pairs = await inTurn(n, ours, theirs);
      const [own, peer, single] = [summary(pairs.ours), summary(pairs.theirs), summary(withoutService)];
      const [ownEnd, peerEnd, singleEnd] = [summary(toEnd.service), summary(toEnd.docker), summary(toEnd.alone)];
      console.log(
        `first output: dsec ${own.p50} ms, without the service ${single.p50} ms, docker ${peer.p50} ms; ` +
          `to the end: ${ownEnd.p50}, ${singleEnd.p50} and ${peerEnd.p50} ms`,
      );
      const figure = saveFigure(
        'run-first-output',
        barChart({
          title: 'From the command line to a container’s first output: median',
          unit: 'ms',
          series: ['dsec run', 'dsec run without its service', `docker run ${docker.version}`],
          groups: [
            { label: 'first output', values: [own.p50, single.p50, peer.p50] },
            { label: 'ended', values: [ownEnd.p50, singleEnd.p50, peerEnd.p50] },
          ],
        }),
      );
      return {
        ratio: pairs.ratio,
        ...atLeast(TARGET, pairs.ratio),
        against: `docker run --rm --network=none, dockerd ${docker.version}, overlay2; both sides are clients of a service that is up`,
        n,
        p50: own.p50,
        p99: own.p99,
        unit: 'ms',
        docker: peer,
        withoutService: single,
        toEnd: { dsec: ownEnd, withoutService: singleEnd, docker: peerEnd },
        figure,
      };
    } finally {
      await service.stop();
    }
  } finally {
    await docker.stop();
  }
}
