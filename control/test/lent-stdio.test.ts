/** What an OCI runtime gives to the sandbox's user is given back, and /dev/null stays everybody's. */
import { spawnSync } from 'node:child_process';
import {
  closeSync,
  copyFileSync,
  existsSync,
  fstatSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmSync,
  statSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findOciRuntime } from '#runtime';

const dsec = join(import.meta.dirname, '../../bin/dsec');
const runtimes = (['crun', 'runc'] as const).filter((name) => {
  try {
    return findOciRuntime(name).name === name;
  } catch {
    return false;
  }
});
const can = process.getuid?.() === 0 && runtimes.length > 0 && existsSync('/bin/busybox');
if (!can) console.log('skipped: not root, or neither crun nor runc, or no busybox');

describe.skipIf(!can)('a sandbox of an OCI runtime', () => {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-lent-'));
  const env = {
    ...process.env,
    DSEC_STORE: join(folder, 'store'),
    DSEC_RUN: join(folder, 'run'),
    DSEC_STATE: join(folder, 'state'),
    DSEC_CACHE: join(folder, 'cache'),
  };
  const owner = (path: string) => {
    const { uid, gid } = statSync(path);
    return [uid, gid];
  };

  beforeAll(() => {
    mkdirSync(join(folder, 'tree/bin'), { recursive: true });
    copyFileSync('/bin/busybox', join(folder, 'tree/bin/sh'));
    const made = spawnSync(dsec, ['convert', `dir:${folder}/tree`, '--name', 'sh:1'], { env, encoding: 'utf8' });
    expect([made.status, made.stderr]).toEqual([0, '']);
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it.each(runtimes)('by %s leaves the owners of our streams as they were', (runtime) => {
    const before = owner('/dev/null');
    const out = join(folder, `out-${runtime}`);
    const fd = openSync(out, 'w');
    const script = 'read -r line; echo "<$line>"; echo to-nothing >&2; echo more >/dev/null; echo end';
    const ran = spawnSync(dsec, ['run', '--runtime', runtime, 'sh:1', '--', 'sh', '-c', script], {
      env,
      stdio: ['ignore', fd, 'ignore'],
    });
    const { uid, gid } = fstatSync(fd);
    closeSync(fd);
    expect([ran.status, readFileSync(out, 'utf8')]).toEqual([0, '<>\nend\n']);
    expect([uid, gid]).toEqual([process.getuid!(), process.getgid!()]);
    expect(owner('/dev/null')).toEqual(before);
  });
});
