/** Processes that are killed in the middle of mounting and unmounting, and many that mount at once. */
import { execFile } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { ErofsLayer } from '../catalog/image.ts';
import { listMounts, mountImage, reclaimMounts, unmount } from '../mount/image-mount.ts';
import { type Bench, haveMkfs, isRoot, makeBench, NOTHING } from './mount-fixture.ts';

const CHILD = fileURLToPath(new URL('./mount-child.ts', import.meta.url));

interface Ended {
  readonly signal: string | undefined;
  readonly result: { id?: string; error?: string; layers?: string[] };
}

function child(bench: Bench, order: object, failPoint?: string): Promise<Ended> {
  const whole = {
    blobs: join(bench.root, 'store', 'blobs', 'sha256'),
    runDir: bench.runDir,
    cacheDir: bench.cacheDir,
    ...order,
  };
  return new Promise((done) => {
    execFile(
      process.execPath,
      ['--import', 'tsx', CHILD, JSON.stringify(whole)],
      { env: { ...process.env, DSEC_FAILPOINT: failPoint ?? '' } },
      (error, stdout, stderr) => {
        if (stderr !== '') console.log(stderr);
        done({ signal: error?.signal ?? undefined, result: stdout === '' ? {} : JSON.parse(stdout) });
      },
    );
  });
}

describe.skipIf(!isRoot || !haveMkfs())('mounts and crashes', { timeout: 300_000 }, () => {
  let bench: Bench;
  let options: { store: Bench['store']; runDir: string; cacheDir: string };
  let layers: ErofsLayer[];

  beforeEach(() => {
    bench = makeBench();
    options = { store: bench.store, runDir: bench.runDir, cacheDir: bench.cacheDir };
    layers = ['one', 'two'].map((name) =>
      bench.layer((folder) => {
        mkdirSync(join(folder, 'dir'));
        writeFileSync(join(folder, name), name.repeat(3000));
      }),
    );
  });
  afterEach(() => bench.remove());

  const shapes = [
    { name: 'an overlay', order: {}, pick: 2 },
    { name: 'one layer', order: {}, pick: 1 },
    { name: 'loop devices and mount(2)', order: { backing: 'loop', overlayApi: 'mount2' }, pick: 2 },
  ];
  const points = [
    'mount-recorded',
    'mount-layer-folder',
    'mount-layer',
    'mount-layers',
    'mount-composed',
    'mount-identified',
    'mount-attached',
  ];
  for (const shape of shapes) {
    it(`a mount of ${shape.name}, killed at any step, is undone by the next command`, async () => {
      for (const point of points) {
        if (point === 'mount-identified' && 'overlayApi' in shape.order) continue;
        const target = bench.folder('target');
        const order = { action: 'mount', target, layers: layers.slice(0, shape.pick), ...shape.order };
        const ended = await child(bench, order, point);
        expect(ended, point).toEqual({ signal: 'SIGKILL', result: {} });
        expect(bench.leftovers().records.length, point).toBe(1);
        const report = await reclaimMounts(options);
        expect(report.undone.length, point).toBe(1);
        expect(bench.leftovers(), point).toEqual(NOTHING);
      }
    });
  }

  it('a mount killed once it stands is kept', async () => {
    const target = bench.folder('target');
    expect((await child(bench, { action: 'mount', target, layers }, 'mount-mounted')).signal).toBe('SIGKILL');
    expect(await reclaimMounts(options)).toEqual({ undone: [], dropped: [], released: [] });
    expect(readFileSync(join(target, 'two'), 'utf8')).toBe('two'.repeat(3000));
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('a mount with an upper, killed, can be made again on the same upper', async () => {
    const target = bench.folder('target');
    const upper = join(bench.root, 'upper');
    const order = { action: 'mount', target, layers, upper };
    expect((await child(bench, order, 'mount-attached')).signal).toBe('SIGKILL');
    await mountImage({ ...options, layers, target, upper });
    writeFileSync(join(target, 'written'), 'w');
    expect((await listMounts(options)).length).toBe(1);
    await unmount(target, options);
    expect(readFileSync(join(upper, 'written'), 'utf8')).toBe('w');
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('an unmount, killed at any step, is finished by the next command', async () => {
    for (const point of ['umount-detached', 'umount-removed']) {
      const target = bench.folder('target');
      await mountImage({ ...options, layers, target });
      expect((await child(bench, { action: 'unmount', target }, point)).signal, point).toBe('SIGKILL');
      expect(bench.leftovers().layerFolders.length, point).toBe(2);
      await reclaimMounts(options);
      expect(bench.leftovers(), point).toEqual(NOTHING);
    }
  });

  it('twenty processes mount one image at once: all succeed and share its layers', async () => {
    const targets = Array.from({ length: 20 }, (_, index) => bench.folder(`target${index}`));
    const ended = await Promise.all(targets.map((target) => child(bench, { action: 'mount', target, layers })));
    expect(ended.map(({ result }) => result.error)).toEqual(targets.map(() => undefined));
    expect(new Set(ended.map(({ result }) => result.id)).size).toBe(20);
    const { mounts, records } = bench.leftovers();
    expect(records.length).toBe(20);
    expect(mounts.filter((path) => path.includes('/run/layers/')).length).toBe(2);
    expect(mounts.length).toBe(22);
    await Promise.all(targets.map((target) => unmount(target, options)));
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('eight processes mount at one target: one succeeds, the others are told', async () => {
    const target = bench.folder('target');
    const orders = Array.from({ length: 8 }, () => child(bench, { action: 'mount', target, layers }));
    const errors = (await Promise.all(orders)).map(({ result }) => result.error);
    expect(errors.filter((error) => error === undefined).length).toBe(1);
    expect(errors.filter((error) => error === 'MOUNT_TARGET_TAKEN').length).toBe(7);
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });
});
