/**
 * A hundred times SIGKILL, at moments spread over the whole of `dsec convert` and `dsec pack-diff`: what has a name in the store is
 * whole, and once the next command has run nothing is left of the killed one.
 */
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readdirSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { listLoops, readMountInfo, umount } from '#linux';
import { allBlobsOf, openImage } from '../catalog/catalog.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { killMoments, runDsec } from './killed-command.ts';
import { writeSmallLayout } from './small-layout.ts';
import { collected } from './store-conformance.ts';

const KILLS = 100;
/** Of them, those of pack-diff, where a sandbox can be made to pack. */
const PACK_KILLS = 40;
const SEED = 20_240_601;

function sandboxObstacle(): string | undefined {
  if (process.getuid?.() !== 0) return 'it needs root';
  for (const [tool, apt] of [
    ['crun', 'crun'],
    ['/bin/busybox', 'busybox-static'],
  ] as const) {
    try {
      execFileSync('sh', ['-c', `command -v ${tool}`], { stdio: 'ignore' });
    } catch {
      return `${tool} is missing (apt-get install ${apt})`;
    }
  }
  return undefined;
}

const obstacle = sandboxObstacle();
if (obstacle !== undefined) console.log(`kill-convert: pack-diff is left out, convert gets its kills: ${obstacle}`);

describe('commands that are killed', { timeout: 400_000 }, () => {
  let root: string;
  let env: NodeJS.ProcessEnv;
  let source: string;
  let killed = 0;
  let leftBehind = 0;

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-kill-')));
    for (const name of ['tmp', 'state']) mkdirSync(join(root, name));
    env = {
      DSEC_STORE: `file://${root}/store`,
      DSEC_RUN: join(root, 'run'),
      DSEC_CACHE: join(root, 'cache'),
      DSEC_STATE: join(root, 'state'),
      // Nothing but what a command makes of its own may be in the temporary folder.
      TMPDIR: join(root, 'tmp'),
      NODE_COMPILE_CACHE: join(root, 'compile-cache'),
    };
    source = `oci:${writeSmallLayout(join(root, 'layout'), 5)}`;
    // The bundle is built, and Node's cache of it filled.
    expect((await runDsec(['version'], env)).status).toBe(0);
  });

  afterAll(() => {
    for (const path of mountsBelow(root)) umount(path, { lazy: true });
    rmSync(root, { recursive: true, force: true });
  });

  const names = (path: string) => (existsSync(path) ? readdirSync(path) : []);
  const leftovers = () => ({
    staging: names(join(root, 'store/tmp')),
    temporary: names(join(root, 'tmp')),
    mounts: mountsBelow(root),
    loops: listLoops().filter(({ file }) => file.startsWith(`${root}/`)),
    mountRecords: names(join(root, 'run/mounts')),
  });
  const nothing = { staging: [], temporary: [], mounts: [], loops: [], mountRecords: [] };

  /** Every name leads to blobs that are all there. Opening the store is what every command begins with. */
  async function expectWholeStore(): Promise<BlobStore> {
    const store = await openStore(`file://${root}/store`);
    for (const { name } of await store.listRefs()) {
      const image = await openImage(store, name);
      for (const { digest, size } of allBlobsOf(image)) {
        expect(await store.stat(digest), `${name}: ${digest}`).toEqual({ sizeBytes: size });
      }
    }
    return store;
  }

  /**
   * Kills runs of one command until `count` of them died of it. Each gets its own arguments: a result that is in the store
   * already would be found, not made.
   */
  async function kill(count: number, seed: number, argsOf: (run: number) => string[]): Promise<void> {
    let run = 0;
    const whole: number[] = [];
    for (let i = 0; i < 3; i++) {
      const ended = await runDsec(argsOf(run++), env);
      expect(ended.status, ended.stderr).toBe(0);
      whole.push(ended.ms);
    }
    const wholeMs = whole.sort((a, b) => a - b)[1]!;
    for (const moment of killMoments(count, wholeMs, seed)) {
      // One that was faster than the moment is done again with an earlier one.
      for (let killMs = moment; ; killMs *= 0.8) {
        const ended = await runDsec(argsOf(run++), env, killMs);
        if (ended.killed) break;
        expect(ended.status, ended.stderr).toBe(0);
      }
      killed++;
      if (leftovers().staging.length > 0) leftBehind++;
      if (killed % 10 === 0) {
        // Another command of any kind cleans up.
        const next = await runDsec(['images', '--json'], env);
        expect(next.status, next.stderr).toBe(0);
        expect(leftovers()).toEqual(nothing);
      }
      await expectWholeStore();
      expect(leftovers()).toEqual(nothing);
    }
  }

  const shapes = [[], ['--collapse-limit', '0'], ['--compress', 'lz4'], ['--collapse', 'metadata']];

  it('convert', async () => {
    const count = obstacle === undefined ? KILLS - PACK_KILLS : KILLS;
    await kill(count, SEED, (run) => [
      'convert',
      source,
      '--name',
      `small:${run}`,
      '--inline-limit',
      String(100 + run),
      ...shapes[run % shapes.length]!,
    ]);
  });

  it.skipIf(obstacle !== undefined)('pack-diff', async () => {
    const script = [
      'cp -r /data /copy',
      'rm -rf /data/layer-0',
      'rm /data/layer-1/text-10',
      'mkdir /data/layer-0',
      'ln /copy/layer-3/text-200 /copy/linked',
      'chmod 700 /data/layer-2/text-20',
    ].join(' && ');
    const made = await runDsec(['convert', source, '--name', 'base:1'], env);
    expect(made.status, made.stderr).toBe(0);
    const ran = await runDsec(['run', 'base:1', '--name', 'work', '--keep', '--', 'sh', '-c', script], env);
    expect(ran.status, ran.stderr).toBe(0);
    const codecs = [[], ['--compress', 'lz4'], ['--compress', 'deflate']];
    await kill(PACK_KILLS, SEED + 1, (run) => [
      'pack-diff',
      'work',
      '--name',
      `packed:${run}`,
      '--exclude',
      // Another layer each time.
      `/copy/layer-${run % 5}/text-${run}`,
      ...codecs[run % codecs.length]!,
    ]);
    const listed = await runDsec(['sandbox', 'ls', '--json'], env);
    expect(JSON.parse(listed.stdout)).toMatchObject([{ name: 'work', state: 'kept' }]);
    expect((await runDsec(['sandbox', 'rm', 'work'], env)).status).toBe(0);
    expect(names(join(root, 'state/sandboxes')).filter((name) => !name.startsWith('.'))).toEqual([]);
  });

  it('left a store in which everything is what its name says', async () => {
    expect(killed).toBe(KILLS);
    // Or the moments were no moments.
    expect(leftBehind).toBeGreaterThan(KILLS / 10);
    const verified = await runDsec(['verify', '--all', '--json'], env);
    expect(verified.status, verified.stderr).toBe(0);
    const reports = JSON.parse(verified.stdout) as { ok: boolean }[];
    expect(reports.length).toBeGreaterThanOrEqual(3);
    expect(reports.every(({ ok }) => ok)).toBe(true);
    // Blobs that have no name yet are whole too: the next conversion takes them as they are.
    const store = await expectWholeStore();
    for (const { digest } of await collected(store.listBlobs())) await store.readVerified(digest);
    expect(leftovers()).toEqual(nothing);
  });
});

function mountsBelow(root: string): string[] {
  return readMountInfo()
    .map((row) => row.mountPoint)
    .filter((path) => path.startsWith(`${root}/`))
    .reverse();
}
