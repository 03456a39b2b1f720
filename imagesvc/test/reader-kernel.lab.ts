/**
 * A kernel without EROFS: images are mounted through our reader behind FUSE, by themselves. The lab's kernel has EROFS as a module,
 * which is taken away. It is also older than the one that cannot resolve handles of FUSE files below OverlayFS.
 */
import { execFileSync } from 'node:child_process';
import {
  appendFileSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { detect, kernelHas, readMountInfo } from '#linux';
import { makeFolder } from './reader-fixture.ts';
import { attributesOf, differences } from './tree-attributes.ts';

const DSEC = fileURLToPath(new URL('../../bin/dsec', import.meta.url));
const MODPROBE = '/proc/sys/kernel/modprobe';
let root: string;
let modprobe: string;

beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-no-erofs-'));
  modprobe = readFileSync(MODPROBE, 'utf8').trim();
  if (kernelHas('erofs')) execFileSync('modprobe', ['-r', 'erofs']);
  writeFileSync(MODPROBE, '/bin/false');
});
afterAll(() => {
  writeFileSync(MODPROBE, modprobe);
  rmSync(root, { recursive: true, force: true });
});

test('images are mounted all the same, from a folder and lazily', { timeout: 30 * 60_000 }, () => {
  expect(kernelHas('erofs')).toBe(false);
  expect(detect().find(({ name }) => name === 'erofs')).toMatchObject({
    present: false,
    fallback: expect.stringContaining('our reader') as string,
  });
  const tree = join(root, 'everything');
  makeFolder(tree);
  const runDir = join(root, 'run');
  const env = { ...process.env, DSEC_STORE: join(root, 'store'), DSEC_RUN: runDir, DSEC_CACHE: join(root, 'cache') };
  // As a user has it, bundled: from source each process would spend half a minute on TypeScript here.
  const dsec = (...args: string[]) => execFileSync(process.execPath, [DSEC, ...args], { env, stdio: 'inherit' });
  const target = join(root, 'target');
  mkdirSync(target);
  dsec('convert', `dir:${tree}`, '--name', 'all:1', '--compress', 'lz4');
  const expected = attributesOf(tree);
  try {
    for (const how of [[], ['--lazy']]) {
      dsec('mount', 'all:1', target, ...how);
      expect(readMountInfo().find(({ mountPoint }) => mountPoint === target)?.type).toBe('fuse');
      expect(differences(expected, attributesOf(target))).toEqual([]);
      dsec('umount', target);
    }
    // Handles that the upper keeps are resolved: the number of a changed file is what it was.
    const number = () => statSync(join(target, 'text-4096'), { bigint: true }).ino;
    dsec('mount', 'all:1', target, '--rw', join(root, 'changes'));
    const before = number();
    appendFileSync(join(target, 'text-4096'), 'more');
    dsec('umount', target);
    writeFileSync('/proc/sys/vm/drop_caches', '3');
    dsec('mount', 'all:1', target, '--rw', join(root, 'changes'));
    expect(number()).toBe(before);
    expect(attributesOf(target).size).toBe(expected.size);
    expect(readFileSync(join(target, 'text-4096')).length).toBe(4100);
    dsec('umount', target);
  } finally {
    for (const id of readdirSync(join(runDir, 'data')).filter((name) => /^[0-9a-f]{16}$/.test(name))) {
      process.kill(JSON.parse(readFileSync(join(runDir, 'data', id, 'state.json'), 'utf8')).supervisor.pid, 'SIGTERM');
    }
  }
});
