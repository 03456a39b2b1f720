/** Limits where control groups are v2 alone, and on file systems that keep project quotas. */
import { execFileSync, spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { atLeast } from '#linux';
import { limitSupport } from '../backend/sandbox-cgroups.ts';
import { diskWay } from '../disk/sandbox-disk.ts';
import { runLimits } from './limits-run-suite.ts';
import { residentLimits } from './limits-suite.ts';
import { until } from './resident-fixture.ts';

it('control groups are v2, with all controllers', () => {
  expect(atLeast(6, 12)).toBe(true);
  expect(limitSupport()).toEqual({ version: 2, missing: [], swap: true });
});

residentLimits('v2');
runLimits('v2');

describe('on ext4 with project quotas', () => {
  const saved = process.env.TMPDIR;
  const folder = mkdtempSync(join(tmpdir(), 'dsec-quota-'));
  const mounted = join(folder, 'mounted');
  beforeAll(() => {
    const image = join(folder, 'image');
    writeFileSync(image, '');
    truncateSync(image, 1 << 30);
    execFileSync('mkfs.ext4', ['-q', '-F', '-O', 'quota,project', '-E', 'quotatype=prjquota', image]);
    mkdirSync(mounted);
    execFileSync('mount', ['-o', 'loop,prjquota', image, mounted]);
    process.env.TMPDIR = mounted;
  });
  afterAll(async () => {
    process.env.TMPDIR = saved;
    // The keeper of the last sandboxes ends a moment after them.
    await until('nothing uses it any more', () => spawnSync('umount', [mounted]).status === 0);
    rmSync(folder, { recursive: true, force: true });
  });

  it('they are what limits a disk', () => {
    expect(diskWay(mounted)).toEqual({ way: 'quota', detail: 'project quotas of ext4' });
  });

  residentLimits('with quotas');
});
