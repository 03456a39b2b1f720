/** Processes that publish images and are killed at any moment leave a store in which everything that has a name is whole. */
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { expect, test } from 'vitest';
import { allBlobsOf, openImage, removeImage } from '../catalog/catalog.ts';
import { collectGarbage } from '../catalog/collect-garbage.ts';
import { openStore } from '../store/open-store.ts';
import { startWriter } from './start-writer.ts';
import { collected } from './store-conformance.ts';

test('thirty publishers killed at random moments, some beside others and beside removal', async () => {
  const root = mkdtempSync(join(tmpdir(), 'dsec-crash-'));
  const path = join(root, 'store');
  const running = new Set<ChildProcess>();
  const start = async (seed: string) => {
    const writer = startWriter('forever', path, seed);
    running.add(writer);
    writer.on('exit', () => running.delete(writer));
    await once(writer.stdout!, 'data');
    return writer;
  };
  try {
    const store = await openStore(path);
    let staged = 0;
    for (let round = 0; round < 15; round++) {
      const writers = await Promise.all([start(`a${round % 4}`), start(`b${round % 3}`)]);
      await delay(Math.random() * 120);
      // A removal beside living publishers must take nothing that they need.
      for (const { name } of (await store.listRefs()).slice(0, 1)) await removeImage(store, name);
      await delay(Math.random() * 60);
      for (const writer of writers) {
        const gone = once(writer, 'exit');
        writer.kill('SIGKILL');
        // It was at work until then: nothing had failed.
        expect(await gone).toEqual([null, 'SIGKILL']);
        await delay(Math.random() * 10);
      }
      staged += readdirSync(join(path, 'tmp')).length;
    }
    // Or the moments were no moments.
    expect(staged).toBeGreaterThan(0);

    const staging = await store.stage();
    expect(readdirSync(join(path, 'tmp')).map((name) => join(path, 'tmp', name))).toEqual([staging.path]);
    await staging.remove();
    expect(readdirSync(join(path, 'tmp'))).toEqual([]);

    const refs = await store.listRefs();
    expect(refs.length).toBeGreaterThan(0);
    for (const { name } of refs) {
      const image = await openImage(store, name);
      for (const blob of allBlobsOf(image)) expect(await store.stat(blob.digest)).toEqual({ sizeBytes: blob.size });
    }
    const verify = async () => {
      for (const { digest } of await collected(store.listBlobs())) await store.readVerified(digest);
    };
    await verify();
    await collectGarbage(store, { graceMs: 0 });
    for (const { name } of refs)
      for (const { digest } of allBlobsOf(await openImage(store, name))) await store.readVerified(digest);
    for (const { name } of refs) await removeImage(store, name);
    expect(await collected(store.listBlobs())).toEqual([]);
    expect(readdirSync(join(path, 'refs'))).toEqual([]);
  } finally {
    for (const writer of running) writer.kill('SIGKILL');
    rmSync(root, { recursive: true, force: true });
  }
}, 180_000);
