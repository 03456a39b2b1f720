/** The soak of a cluster, a few cycles of it: each service is killed once, and nothing is left of any cycle. */
import { existsSync, mkdtempSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { findAgent } from '#runtime';
import { soak } from '../cluster-soak.ts';

const canRun = process.getuid?.() === 0 && findAgent() !== undefined && existsSync('/bin/busybox');
if (!canRun) console.log('skipped: not root, or no dsec-agent, or no busybox');

it.skipIf(!canRun)('leaves nothing of a cycle, whichever service is killed in it', { timeout: 400_000 }, async () => {
  const folder = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-soak-')));
  try {
    const { samples, made, kills } = await soak({
      folder,
      clients: 3,
      sandboxes: 8,
      next: (cycle) => (cycle < 4 ? { fault: cycle < 3 } : undefined),
    });
    expect([samples.length, made, kills]).toEqual([4, 32, 3]);
    for (const { mounts } of samples) expect(mounts).toBe(0);
  } finally {
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    rmSync(folder, { recursive: true, force: true });
  }
});
