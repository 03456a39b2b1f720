/**
 * `true` in a sandbox that runs, from the command line to its exit: `dsec sandbox exec` against `docker exec`, both clients of a service
 * that is up, both started by a shell. Over HTTP, without a process for each, it is reported beside them.
 */
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result } from './benchmark.ts';
import { DockerDaemon, dockerMissing } from './docker-daemon.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { PromptShell } from './prompt-shell.ts';
import { inTurn, summary } from './sample.ts';
import { SandboxHost, sandboxesMissing } from './sandbox-host.ts';
import { writeSmallImage } from './small-image.ts';
import { timedCommand } from './timed-command.ts';
import { missingTool } from './tool.ts';
import { withScratch } from './work-folder.ts';

const TARGET = 10;
const COMMAND = '/bin/true';
const WARM_UP_RUNS = 30;

export const benchmark: Benchmark = {
  name: 'sandbox-exec',
  about: 'dsec sandbox exec of true, against docker exec',
  needs: () => sandboxesMissing() ?? dockerMissing() ?? missingTool({ skopeo: 'skopeo' }),
  run: () => withScratch('exec', measure),
};

async function measure(folder: string): Promise<Result> {
  const { layout } = await writeSmallImage(folder);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`oci:${layout}`, 'small:1');
  const docker = await DockerDaemon.start(join(folder, 'd'));
  const shell = new PromptShell(folder);
  try {
    await docker.load(layout, 'small:1');
    const host = await SandboxHost.start(dsec);
    try {
      const name = await host.create('small:1');
      await timedCommand(docker.argv(['run', '-d', '--name', 'peer', '--network=none', 'small:1', 'sh', '-c', WAITS]));
      const overHttp = async () => {
        const startedAt = performance.now();
        await host.exec(name, [COMMAND]);
        return performance.now() - startedAt;
      };
      const { argv, env } = host.service.argv(['sandbox', 'exec', name, '--', COMMAND]);
      const ours = () => shell.run(argv, env);
      const theirs = () => shell.run(docker.argv(['exec', 'peer', COMMAND]));
      for (let i = 0; i < WARM_UP_RUNS; i++) for (const side of [overHttp, ours]) await side();
      for (let i = 0; i < 2; i++) await theirs();
      const n = numberOption('n', 25);
      const pairs = await inTurn(n, ours, theirs);
      const http: number[] = [];
      for (let i = 0; i < n; i++) http.push(await overHttp());
      const [own, peer, direct] = [summary(pairs.ours), summary(pairs.theirs), summary(http)];
      console.log(`exec of true: dsec ${own.p50} ms, over HTTP ${direct.p50} ms, docker ${peer.p50} ms`);
      return {
        ratio: pairs.ratio,
        ...atLeast(TARGET, pairs.ratio),
        against: `docker exec, dockerd ${docker.version}`,
        n,
        p50: own.p50,
        p99: own.p99,
        unit: 'ms',
        docker: peer,
        overHttp: direct,
      };
    } finally {
      await host.stop();
      await timedCommand(docker.argv(['kill', 'peer'])).catch(() => {});
    }
  } finally {
    shell.end();
    await docker.stop();
  }
}

/** The image has no sleep. */
const WAITS = 'read -r line < /dev/zero';
