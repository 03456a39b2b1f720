/** A container for tasks among the sandboxes of a machine: its pool alone ends it. */
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { expect, it } from 'vitest';
import { processIdentity, tryLock } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import type { PoolEnvironment } from '../fncall/pool-spec.ts';
import { FnCallNode } from '../index.ts';
import { type SandboxRecord, writeRecord } from '../sandbox/sandbox-record.ts';
import { listSandboxes, removeSandbox } from '../sandbox/sandboxes.ts';
import { runtimeFolders, sandboxFolders } from '../sandbox/state-folders.ts';
import { forceRemoveSandbox, stopSandbox } from '../sandbox/stop-sandbox.ts';

it.skipIf(process.geteuid?.() !== 0)('is listed with its pool, and neither stopped nor removed by hand', async () => {
  const root = mkdtempSync(join(tmpdir(), 'dsec-of-pool-'));
  const folders = runtimeFolders({
    stateDir: join(root, 'state'),
    runDir: join(root, 'run'),
    cacheDir: join(root, 'cache'),
  });
  const places = sandboxFolders(folders, 'fncall-0123abcd');
  for (const folder of [places.folder, dirname(places.lock)]) mkdirSync(folder, { recursive: true });
  const record: SandboxRecord = {
    version: 1,
    name: 'fncall-0123abcd',
    id: 'fncall-0123abcd-1',
    state: 'running',
    keep: false,
    createdAt: new Date().toISOString(),
    backend: 'dsec',
    store: 'file:///none',
    base: { name: 'web:1', digest: `sha256:${'0'.repeat(64)}` as SandboxRecord['base']['digest'] },
    toolkits: [],
    owner: processIdentity()!,
    mountPoints: [],
    pool: 'default',
  };
  writeRecord(places.record, record, false);
  // As the service that has the pool does.
  const held = tryLock(places.lock)!;
  try {
    expect(listSandboxes(folders)).toMatchObject([{ name: 'fncall-0123abcd', pool: 'default' }]);
    const refused = {
      code: 'RUNTIME_SANDBOX_OF_POOL',
      message: expect.stringContaining('the pool default'),
      hint: expect.stringContaining('dsec fncall rm default'),
    };
    await expect(stopSandbox(record.name, { timeMs: 0, folders })).rejects.toMatchObject(refused);
    await expect(forceRemoveSandbox(record.name, folders)).rejects.toMatchObject(refused);
    await expect(removeSandbox(record.name, folders)).rejects.toMatchObject(refused);
  } finally {
    held.release();
    rmSync(root, { recursive: true, force: true });
  }
});

it.skipIf(process.geteuid?.() !== 0 || findAgent() === undefined)(
  'goes with its pool, which is found by what it is listed as also where nobody named it',
  async () => {
    const node = new FnCallNode();
    const environment = { store: { url: 'file:///none' }, base: { name: 'web:1' } } as PoolEnvironment;
    const { name, spec } = node.poolFor(environment);
    // What its containers have on record.
    expect(spec.pool).toBe(name);
    expect(node.pools().map((one) => [one.name, one.implicit])).toEqual([[name, true]]);
    await node.definePool(name, environment, { ceiling: 3 });
    await node.removePool(name);
    expect(node.pools().map((one) => [one.name, one.implicit])).toEqual([[name, true]]);
    await node.removePool(name);
    expect(node.pools()).toEqual([]);
    await expect(node.removePool(name)).rejects.toMatchObject({ code: 'RUNTIME_FNCALL_NO_POOL' });
    await node.close();
  },
);
