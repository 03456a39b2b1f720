/**
 * `dsec ls -lR` of an image with 100,000 entries, read from the EROFS itself by a process that starts for it, against `ls -lR`
 * of the same tree on disk and in the kernel's mount of the image. Everything is in the page cache.
 */
import { mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { inTurn, summary } from './sample.ts';
import { timedCommand } from './timed-command.ts';
import { withScratch } from './work-folder.ts';

const ENTRIES = 100_000;
const FOLDERS = 2_000;

export const benchmark: Benchmark = {
  name: 'list-mountless',
  about: 'ls -lR of 100,000 entries without a mount, against ls -lR on disk and in the mount',
  run: () => withScratch('list-mountless', measure),
};

/** Small files, a link in each folder, folders in folders; the root not counted. */
function makeTree(root: string): void {
  mkdirSync(root);
  const perFolder = ENTRIES / FOLDERS - 1;
  for (let f = 0; f < FOLDERS; f++) {
    const folder = join(root, f % 20 === 0 ? `package-${f}` : `package-${f - (f % 20)}/part-${f % 20}`);
    mkdirSync(folder);
    for (let i = 1; i < perFolder; i++) writeFileSync(join(folder, `module-${i}.js`), `export default ${f * i};\n`);
    symlinkSync('module-1.js', join(folder, 'main.js'));
  }
}

async function measure(folder: string): Promise<Result> {
  const tree = join(folder, 'tree');
  makeTree(tree);
  const dsec = new DsecCommand(folder);
  await dsec.convert(`dir:${tree}`, 'many:1');
  await dsec.warmUp();
  const n = numberOption('n', 15);
  const ours = async () => (await dsec.run(['ls', '-lR', 'many:1'], { stdout: 'drop' })).ms;
  const theirs = (path: string) => async () =>
    (await timedCommand(['ls', '-lR', path], { stdout: 'drop', env: { LC_ALL: 'C' } })).ms;
  const listed = (await dsec.run(['ls', '-R', '--json', 'many:1', '/'])).stdout.split('\n').length - 1;
  await theirs(tree)();

  const disk = await inTurn(n, ours, theirs(tree));
  const target = join(folder, 'mounted');
  mkdirSync(target);
  let mounted: Awaited<ReturnType<typeof inTurn>> | undefined;
  if (process.getuid?.() === 0) {
    await dsec.run(['mount', 'many:1', target]);
    try {
      await theirs(target)();
      mounted = await inTurn(n, ours, theirs(target));
    } finally {
      await dsec.run(['umount', target]);
    }
  } else console.log('the kernel mount is left out: it needs root');
  const own = summary(disk.ours);
  console.log(
    `dsec ls -lR ${own.p50} ms; ls -lR on disk ${summary(disk.theirs).p50} ms, mounted ${mounted ? summary(mounted.theirs).p50 : '-'} ms`,
  );
  return {
    ratio: disk.ratio,
    ...atLeast(1, disk.ratio),
    against: 'ls -lR of the same tree on disk, cached',
    n,
    p50: own.p50,
    p99: own.p99,
    unit: 'ms',
    entries: ENTRIES,
    listed,
    disk: summary(disk.theirs),
    mounted: mounted === undefined ? undefined : { ratio: mounted.ratio, ...summary(mounted.theirs) },
  };
}
