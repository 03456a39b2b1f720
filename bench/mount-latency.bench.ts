/**
 * How long an image takes to become a folder, and to go away: `dsec mount` and `dsec umount` as processes and as calls in one
 * that runs, against what a user of runc does (`umoci unpack` of the same image, and removing it) and against mount(8) of
 * an image file on a loop device.
 */
import { mkdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { mountImage, openImage, openStore, unmount } from '#imagesvc';
import { atLeast, type Benchmark, type Result } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, type Summary, summary } from './sample.ts';
import { settle } from './settle.ts';
import { busyboxMissing, writeSmallImage } from './small-image.ts';
import { timedCommand } from './timed-command.ts';
import { findTool, missingTool, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

/** Nobody was promised a figure: what makes lazy mounting worth having at all. */
const TARGET = 5;
const IN_PROCESS = 200;

export const benchmark: Benchmark = {
  name: 'mount-latency',
  about: 'mount and umount of an image, against umoci unpack and a loop mount',
  needs: () => needsRoot() ?? missingTool({ umoci: 'umoci', 'mkfs.erofs': 'erofs-utils' }) ?? busyboxMissing(),
  run: () => withScratch('mount-latency', measure),
};

async function measure(folder: string): Promise<Result> {
  const { layout } = await writeSmallImage(folder);
  const dsec = new DsecCommand(folder);
  const one = (await dsec.convert(`oci:${layout}`, 'small:one')).image;
  const each = (await dsec.convert(`oci:${layout}`, 'small:each', ['--collapse-limit', '0'])).image;
  await dsec.warmUp();
  const target = join(folder, 'mounted');
  mkdirSync(target);

  const byProcess = async (image: string) => {
    const { ms } = await dsec.run(['mount', image, target]);
    return ms + (await dsec.run(['umount', target])).ms;
  };
  const unpacked = join(folder, 'unpacked');
  const byUmoci = async () => {
    const { ms } = await timedCommand(['umoci', 'unpack', '--image', layout, unpacked]);
    return ms + (await timedCommand(['rm', '-rf', unpacked])).ms;
  };
  await byProcess('small:each');
  const n = numberOption('n', 10);
  const umoci = await inTurn(n, () => byProcess('small:each'), byUmoci, settle);

  const loop = await loopMount(folder, target);
  const looped = await inTurn(n * 3, () => byProcess('small:each'), loop.mountAndUnmount);
  const calls = {
    oneLayer: await byCall(dsec, 'small:one', target),
    eachLayer: await byCall(dsec, 'small:each', target),
  };
  const processes = summary(umoci.ours);
  const row = (name: string, { n, p50, p99 }: Summary) => [name, n, p50.toFixed(1), p99.toFixed(1)];
  printTable([
    ['mount + umount', 'n', 'p50 ms', 'p99 ms'],
    row(`dsec, processes, ${each.layers} layers`, processes),
    row(`dsec, calls, ${each.layers} layers`, calls.eachLayer),
    row(`dsec, calls, ${one.layers} layer`, calls.oneLayer),
    row('umoci unpack + rm -rf', summary(umoci.theirs)),
    row(`${loop.command} + umount`, summary(looped.theirs)),
  ]);
  return {
    ratio: umoci.ratio,
    ...atLeast(TARGET, umoci.ratio),
    against: 'umoci unpack of the same image, and rm -rf',
    n,
    p50: processes.p50,
    p99: processes.p99,
    unit: 'ms',
    layers: each.layers,
    umoci: summary(umoci.theirs),
    loop: { command: loop.command, ratio: looped.ratio, ...summary(looped.theirs) },
    calls,
  };
}

/** In this process, as a resident service does it. The first one proves the data files and is not counted. */
async function byCall(dsec: DsecCommand, name: string, target: string): Promise<Summary> {
  const store = await openStore(dsec.env.DSEC_STORE!);
  const image = await openImage(store, name);
  const folders = { runDir: dsec.env.DSEC_RUN!, cacheDir: dsec.env.DSEC_CACHE! };
  const sample: number[] = [];
  for (let i = 0; i <= IN_PROCESS; i++) {
    const startedAt = performance.now();
    await mountImage({ store, image, target, ...folders });
    await unmount(target, folders);
    if (i > 0) sample.push(performance.now() - startedAt);
  }
  return summary(sample);
}

/** squashfs where its tool is, EROFS otherwise; one file with a small tree in it. */
async function loopMount(folder: string, target: string) {
  const tree = join(folder, 'loop-tree');
  mkdirSync(tree);
  for (let i = 0; i < 100; i++) writeFileSync(join(tree, `file-${i}`), String(i).repeat(1000));
  const image = join(folder, 'loop.img');
  const squash = findTool('mksquashfs') !== undefined;
  const type = squash ? 'squashfs' : 'erofs';
  await timedCommand(squash ? ['mksquashfs', tree, image, '-quiet'] : ['mkfs.erofs', '--quiet', image, tree]);
  rmSync(tree, { recursive: true });
  return {
    command: `mount -t ${type} -o loop,ro`,
    mountAndUnmount: async () => {
      const { ms } = await timedCommand(['mount', '-t', type, '-o', 'loop,ro', image, target]);
      return ms + (await timedCommand(['umount', target])).ms;
    },
  };
}
