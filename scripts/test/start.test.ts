/**
 * `npm start` as it is promised: the whole line on images made of this machine, told as a story with figures, and the same figures as
 * one line of JSON; on any other image; and what it says to whoever is not root.
 */
import { type SpawnSyncReturns, spawnSync } from 'node:child_process';
import { chmodSync, chownSync, existsSync, mkdirSync, mkdtempSync, readdirSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { humanSize } from '#base';
import { writeSmallLayout } from '../../imagesvc/test/small-layout.ts';

const root = fileURLToPath(new URL('../..', import.meta.url));
const obstacle =
  process.getuid?.() !== 0
    ? 'it needs root'
    : ['busybox', 'git', 'crun'].find((tool) => spawnSync('sh', ['-c', `command -v ${tool}`]).status !== 0);
if (obstacle !== undefined)
  console.log(`start: skipped: ${obstacle === 'it needs root' ? obstacle : `${obstacle} is missing`}`);

interface Figures {
  readonly image: string;
  readonly files: number;
  readonly bytesIn: number;
  readonly bytesStored: number;
  readonly bytesRead: number | null;
  readonly timeToFirstOutputMs: number;
  readonly packDiff: { image: string; inodes: number; bytes: number; added: number; changed: number; deleted: number };
  readonly verified: boolean;
}

describe.skipIf(obstacle !== undefined)('npm start', { timeout: 400_000 }, () => {
  let folder: string;
  let env: NodeJS.ProcessEnv;

  beforeAll(() => {
    folder = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-start-')));
    mkdirSync(join(folder, 'tmp'));
    env = {
      ...process.env,
      TMPDIR: join(folder, 'tmp'),
      DSEC_STORE: `file://${folder}/store`,
      DSEC_RUN: join(folder, 'run'),
      DSEC_STATE: join(folder, 'state'),
      DSEC_CACHE: join(folder, 'cache'),
    };
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  const start = (...args: string[]) =>
    spawnSync(process.execPath, [join(root, 'scripts/start.mjs'), ...args], { encoding: 'utf8', env });

  /** The story, and the figures of its last line. */
  function told({ status, stdout, stderr }: SpawnSyncReturns<string>): { story: string; figures: Figures } {
    expect(status, stderr).toBe(0);
    const lines = stdout.trimEnd().split('\n');
    const figures = JSON.parse(lines.pop()!) as Figures;
    expect(Object.keys(figures)).toEqual([
      'image',
      'files',
      'bytesIn',
      'bytesStored',
      'bytesRead',
      'timeToFirstOutputMs',
      'packDiff',
      'verified',
    ]);
    expect(figures.verified).toBe(true);
    for (const digest of [figures.image, figures.packDiff.image]) expect(digest).toMatch(/^sha256:[0-9a-f]{64}$/);
    const numbers = [
      figures.files,
      figures.bytesIn,
      figures.bytesStored,
      figures.timeToFirstOutputMs,
      figures.packDiff.inodes,
    ];
    for (const number of numbers) expect(number).toBeGreaterThan(0);
    // Everything lay in one folder, which is gone; and a store of whoever starts it was not touched.
    expect(readdirSync(join(folder, 'tmp'))).toEqual([]);
    expect(existsSync(join(folder, 'store'))).toBe(false);
    return { story: lines.join('\n'), figures };
  }

  it('converts, mounts, runs, packs and verifies images of this machine, and tells figures', () => {
    const { story, figures } = told(start('--json'));
    const { bytesIn, bytesStored, bytesRead, timeToFirstOutputMs, packDiff } = figures;
    expect(story).toMatch(/^Three OCI images, made of what this machine has:\n/);
    expect(story).toMatch(/^ {2}base +a static busybox: 2 layers, \d+ entries, /m);
    expect(story).toMatch(/^ {2}toolkit +Node [\d.]+(?: and npm: 2 layers|: 1 layer), \d+ entries, /m);
    expect(story).toMatch(/^ {2}workspace +a small git repository: 1 layer, \d+ entries, /m);
    const inodes = [...story.matchAll(/^ {2}main-job\/\w+:1 +1 EROFS layer, (\d+) inodes, /gm)].map((match) =>
      Number(match[1]),
    );
    expect(inodes).toHaveLength(3);
    expect(inodes.reduce((sum, count) => sum + count, 0)).toBe(figures.files);
    // npm alone has two thousand.
    expect(figures.files).toBeGreaterThan(300);
    expect(story).toContain(`\n  ${humanSize(bytesIn)} in, ${humanSize(bytesStored)} stored, in `);
    expect(story).toMatch(/^Mounted on a folder, 3 layers: \d+ entries, after \d+ ms$/m);
    expect(story).toMatch(/^ {2}\$ node count\.js README\.md\n {2}8 words in README\.md$/m);
    expect(story).toContain(`\n  first output after ${timeToFirstOutputMs} ms, mounting included (`);
    if (bytesRead !== null) expect(story).toContain(`; read ${humanSize(bytesRead)} of ${humanSize(bytesStored)} (`);
    for (const line of [
      'C /workspace/README.md',
      'A /workspace/notes.txt',
      'D /workspace/old-notes.txt',
      'A /workspace/out/',
    ]) {
      expect(story).toContain(`\n  ${line}`);
    }
    expect(story).toContain(`\n  one layer: ${packDiff.inodes} inodes, ${humanSize(packDiff.bytes)}\n`);
    expect(packDiff).toMatchObject({ added: 3, changed: 2, deleted: 1 });
    expect(story).toMatch(/^The packed image, run:\n.*\n.*\n.*\n {2}old-notes\.txt is gone$/m);
    expect(story).toMatch(
      /^Verified: \d+ blobs, .*: ok\.\nDone in [\d.]+ s\. Images and sandboxes of it are gone again\.$/m,
    );
  });

  it('runs the line on another image: npm start -- oci:DIR', () => {
    const source = `oci:${writeSmallLayout(join(folder, 'layout'), 2)}`;
    const { story, figures } = told(start('--', source, '--json'));
    expect(story.split('\n')[0]).toBe(`${source}, converted to EROFS:`);
    expect(story).toContain('\n  hello from this image\n');
    expect(story).toContain('\n  A /dsec-note 23\n');
    expect(figures.packDiff).toMatchObject({ added: 1, deleted: 0 });
  });

  it('says of a source that is not there what is missing', () => {
    const { status, stderr } = start('oci:/nowhere');
    expect([status, stderr]).toEqual([
      4,
      expect.stringMatching(/^dsec: \/nowhere: no such folder\n {6}check the path\n$/m),
    ]);
  });

  it('does without root what needs none, and says what the rest needs', () => {
    const own = join(folder, 'own');
    mkdirSync(own);
    chownSync(own, 65534, 65534);
    chmodSync(folder, 0o755);
    const source = `oci:${writeSmallLayout(join(folder, 'open'), 1)}`;
    const { status, stdout, stderr } = spawnSync(process.execPath, [join(root, 'bin/dsec'), 'main-job', source], {
      encoding: 'utf8',
      env: { ...env, TMPDIR: own, HOME: own, DSEC_RUN: join(own, 'run'), DSEC_STORE: join(own, 'store') },
      uid: 65534,
      gid: 65534,
    });
    expect([status, stderr]).toEqual([5, expect.stringMatching(/root/)]);
    expect(stdout).toMatch(/^Verified: \d+ blobs, .*: ok\.$/m);
    expect(readdirSync(own).filter((name) => name.startsWith('dsec-main-job'))).toEqual([]);
  });
});
