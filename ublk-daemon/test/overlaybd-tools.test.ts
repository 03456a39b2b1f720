/**
 * Both ways with the real OverlayBD tools, where they are on the PATH (or in $DSEC_OVERLAYBD_TOOLS): what we write they read, what
 * they write we read. docs/overlaybd.md says with which version this was last done.
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { readBytes } from '../byte-source.ts';
import { type CommitOptions, commitLayer } from '../layer/commit.ts';
import { openLayerFile } from '../layer/layer-file.ts';
import { openStack } from '../layer/stack.ts';
import { NULL_UUID } from '../lsmt/header.ts';
import { MAX_SEGMENT_SECTORS } from '../lsmt/segment.ts';
import { StackedDisk } from '../stacked-disk.ts';
import { LogUpper } from '../writable/log-upper.ts';
import { DiskModel, SECTOR } from './disk-model.ts';
import { randomNumbers } from './random-numbers.ts';

const PATH = [process.env.DSEC_OVERLAYBD_TOOLS, process.env.PATH].filter(Boolean).join(':');
const isThere = spawnSync('overlaybd-create', ['--help'], { env: { ...process.env, PATH } }).error === undefined;
if (!isThere)
  console.log('skipped: the tools of containerd/overlaybd are not on the PATH (or in $DSEC_OVERLAYBD_TOOLS)');

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-overlaybd-tools-'));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function tool(name: string, ...args: string[]): void {
  const { status, stdout, stderr } = spawnSync(name, args, {
    cwd: folder,
    env: { ...process.env, PATH },
    encoding: 'utf8',
  });
  if (status !== 0) throw new Error(`${name} ${args.join(' ')}: ${status}\n${stdout}\n${stderr}`);
}

const isRoot = process.getuid?.() === 0;

/** It insists on a file in /etc: it gets one in a mount namespace of its own. */
function mergeTool(...args: string[]): void {
  const upper = join(folder, 'etc/overlaybd');
  mkdirSync(upper, { recursive: true });
  mkdirSync(join(folder, 'etc-work'), { recursive: true });
  writeFileSync(join(upper, 'overlaybd.json'), JSON.stringify(serviceConfig()));
  const mount = `mount -t overlay none -o lowerdir=/etc,upperdir=${folder}/etc,workdir=${folder}/etc-work /etc`;
  tool('unshare', '-m', 'sh', '-c', `${mount} && exec "$@"`, 'sh', 'overlaybd-merge', ...args);
}

const SECTORS = 65_536;

/** Holes, zeroed ranges, single sectors, and runs longer than an entry can say. */
async function fill(disk: StackedDisk, model: DiskModel, seed: number): Promise<void> {
  const next = randomNumbers(seed);
  for (let operation = 1; operation < 400; operation++) {
    const length = operation % 100 === 0 ? 20_000 : 1 + Math.floor(next() * 40);
    const start = Math.floor(next() * (SECTORS - length));
    if (next() < 0.2) {
      model.zero(start, length);
      await disk.discard(start * SECTOR, length * SECTOR);
    } else await disk.write(start * SECTOR, model.write(start, length, seed * 1000 + operation));
  }
}

async function expectFile(paths: readonly string[], model: DiskModel): Promise<void> {
  const disk = new StackedDisk(await openStack(paths, SECTORS * SECTOR));
  expect(await model.difference(disk)).toBeUndefined();
  await disk.close();
}

let uuids = 0;
async function makeUpper(name: string, model: DiskModel, below: readonly string[] = [], seed = 1): Promise<LogUpper> {
  const files = { data: join(folder, `${name}.data`), index: join(folder, `${name}.index`) };
  const stack = await openStack(below, SECTORS * SECTOR);
  const uuid = `000000${String(++uuids).padStart(2, '0')}-0000-4000-8000-000000000001`;
  const upper = await LogUpper.create(files, { virtualSize: SECTORS * SECTOR, uuid, parentUuid: stack.uuid });
  const disk = new StackedDisk(stack, upper);
  await fill(disk, model, seed);
  await disk.flush();
  await stack.close();
  return upper;
}

describe.skipIf(!isThere)('the OverlayBD tools', () => {
  test('commit a writable layer of ours', async () => {
    const model = new DiskModel(SECTORS);
    const upper = await makeUpper('upper', model);
    await upper.close();
    tool('overlaybd-commit', 'upper.data', 'upper.index', 'theirs.lsmt');
    await expectFile([join(folder, 'theirs.lsmt')], model);
    tool(
      'overlaybd-commit',
      '-z',
      '-t',
      '--bs',
      '16',
      '--algorithm',
      'zstd',
      'upper.data',
      'upper.index',
      'theirs.tar',
    );
    await expectFile([join(folder, 'theirs.tar')], model);
  });

  test('commit one that was compacted', async () => {
    const model = new DiskModel(SECTORS);
    const upper = await makeUpper('compacted', model);
    expect((await upper.compact()).reclaimedBytes).toBeGreaterThan(0);
    await upper.close();
    tool('overlaybd-commit', 'compacted.data', 'compacted.index', 'compacted.lsmt');
    await expectFile([join(folder, 'compacted.lsmt')], model);
  });

  test('read a layer that we sealed in place', async () => {
    const model = new DiskModel(SECTORS);
    const upper = await makeUpper('sealed', model);
    await upper.seal();
    await upper.close();
    tool('overlaybd-commit', '--commit_sealed', 'sealed.data', 'from-sealed.lsmt');
    await expectFile([join(folder, 'sealed.data')], model);
    await expectFile([join(folder, 'from-sealed.lsmt')], model);
  });

  test('maximal segments of data and of zeros, and an index filled with padding, both ways', async () => {
    const model = new DiskModel(SECTORS);
    const files = { data: join(folder, 'long.data'), index: join(folder, 'long.index') };
    const upper = await LogUpper.create(files, {
      virtualSize: SECTORS * SECTOR,
      uuid: '000000AA-0000-4000-8000-000000000001',
    });
    const disk = new StackedDisk(await openStack([], SECTORS * SECTOR), upper);
    await disk.write(0, model.write(0, 40_000, 1));
    model.zero(3, 34_000);
    await disk.discard(3 * SECTOR, 34_000 * SECTOR);
    await disk.flush();
    const ours = join(folder, 'long.ours');
    await commitLayer(ours, upper.freeze(0), [upper.source], { virtualSize: SECTORS * SECTOR });
    await disk.close();
    tool('overlaybd-commit', 'long.data', 'long.index', 'long.theirs');
    tool('overlaybd-commit', '--commit_sealed', 'long.ours', 'long.again');
    for (const name of ['long.ours', 'long.theirs', 'long.again']) {
      const layer = await openLayerFile(join(folder, name));
      const { index, paddingEntries } = layer;
      const lengths = Array.from({ length: index.count }, (_, at) => index.end(at) - index.start(at));
      await layer.source.close();
      expect([name, (index.count + paddingEntries) % 256, paddingEntries > 0]).toEqual([name, 0, true]);
      expect([name, Math.max(...lengths)]).toEqual([name, MAX_SEGMENT_SECTORS]);
      await expectFile([join(folder, name)], model);
    }
  });

  const wraps: [string, Omit<CommitOptions, 'virtualSize'>][] = [
    ['plain', {}],
    ['tar', { tar: true }],
    ['lz4, blocks of 4 KiB', { zfile: { algorithm: 'lz4' } }],
    ['lz4, blocks of 64 KiB, tar', { zfile: { algorithm: 'lz4', blockSize: 65536 }, tar: true }],
    ['zstd, blocks of 16 KiB', { zfile: { algorithm: 'zstd', blockSize: 16384 } }],
    ['zstd, blocks of 32 KiB, tar', { zfile: { algorithm: 'zstd', blockSize: 32768 }, tar: true }],
  ];
  test.each(wraps)('merge two layers of ours: %s', async (name, options) => {
    const stem = name.replace(/\W+/g, '-');
    const model = new DiskModel(SECTORS);
    const paths: string[] = [];
    for (const layer of [0, 1]) {
      const upper = await makeUpper(`${stem}-${layer}`, model, paths, layer + 2);
      const path = join(folder, `${stem}-${layer}.layer`);
      const { uuid, parentUuid } = upper;
      await commitLayer(path, upper.freeze(0), [upper.source], {
        virtualSize: SECTORS * SECTOR,
        uuid,
        parentUuid,
        ...options,
      });
      await upper.close();
      paths.push(path);
    }
    await expectFile(paths, model);
    writeFileSync(
      join(folder, 'merge.json'),
      JSON.stringify({ repoBlobUrl: '', lowers: paths.map((file) => ({ file })), resultFile: join(folder, 'result') }),
    );
    if (isRoot) {
      mergeTool('merge.json', `${stem}.merged`);
      await expectFile([join(folder, `${stem}.merged`)], model);
    }
    if (options.zfile !== undefined && options.tar !== true) {
      tool('overlaybd-zfile', '--verify', `${stem}-1.layer`);
      tool('overlaybd-zfile', '-x', `${stem}-1.layer`, `${stem}-1.plain`);
      const layer = await openLayerFile(paths[1]!);
      const bytes = await readBytes(layer.source, 0, layer.source.sizeBytes);
      expect(bytes.equals(readFileSync(join(folder, `${stem}-1.plain`)))).toBe(true);
      await layer.source.close();
    }
  });

  test('make a writable layer that we write to, and commit it', async () => {
    tool('overlaybd-create', 'created.data', 'created.index', '1');
    const upper = await LogUpper.open({ data: join(folder, 'created.data'), index: join(folder, 'created.index') });
    expect(upper.parentUuid).toBe(NULL_UUID);
    const model = new DiskModel(SECTORS);
    const disk = new StackedDisk(await openStack([], 2 ** 30), upper);
    await fill(disk, model, 5);
    await disk.close();
    tool('overlaybd-commit', 'created.data', 'created.index', 'created.lsmt');
    const read = new StackedDisk(await openStack([join(folder, 'created.lsmt')]));
    expect(read.sizeBytes).toBe(2 ** 30);
    expect(await model.difference(read)).toBeUndefined();
    await read.close();
  });
});

function serviceConfig(): unknown {
  return {
    logConfig: { logLevel: 3, logPath: join(folder, 'log') },
    cacheConfig: { cacheType: 'file', cacheDir: join(folder, 'cache'), cacheSizeGB: 1 },
    gzipCacheConfig: { enable: false, cacheDir: join(folder, 'gzip'), cacheSizeGB: 1 },
    credentialConfig: { mode: 'file', path: '' },
    ioEngine: 0,
    download: { enable: false },
    enableAudit: false,
    registryFsVersion: 'v2',
  };
}
