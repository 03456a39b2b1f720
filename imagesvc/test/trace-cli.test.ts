/**
 * bin/dsec with traces, on a folder and in an S3 bucket: what is recorded, that the next start finds it fetched, layout by a trace,
 * figures of a node, and that whoever is killed leaves nothing.
 */
import { execFile, execFileSync, spawn } from 'node:child_process';
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { findDataServer, stopDataServers } from '../data-server/data-server.ts';
import { findS3Server, LoopbackS3, S3_KEYS } from './loopback-s3.ts';
import { someBytes } from './store-conformance.ts';

const DSEC = join(import.meta.dirname, '../../bin/dsec');
const BUSYBOX = '/bin/busybox';
const CHUNK = 256 * 1024;
const WAIT_MS = 120_000;

function canRun(): boolean {
  if (process.getuid?.() !== 0) return false;
  try {
    execFileSync('sh', ['-c', `command -v crun && test -x ${BUSYBOX} && test -c /dev/fuse`], { stdio: 'ignore' });
    return true;
  } catch {
    console.log('trace-cli: skipped: it needs root, crun, a static busybox and FUSE');
    return false;
  }
}

const can = canRun();
const s3Program = can ? findS3Server('trace-cli') : undefined;

interface Ran {
  readonly status: number;
  readonly stdout: string;
  readonly stderr: string;
}

describe.each([
  ['a folder', can, (root: string) => Promise.resolve({ url: `file://${root}/store`, stop: async () => {} })],
  [
    'an S3 bucket',
    s3Program !== undefined,
    async (root: string) => {
      const s3 = await LoopbackS3.start(s3Program!, root, 'bucket');
      return { url: s3.url('bucket', 'images'), stop: () => s3.stop() };
    },
  ],
])('traces in %s', (where, possible, start) => {
  /** What does not depend on the store is tested with one: each command is a process. */
  const alsoLocal = test.skipIf(where !== 'a folder');
  describe.skipIf(!possible)('', { timeout: 300_000 }, () => {
    let root: string;
    let store: { url: string; stop(): Promise<void> };
    let env: NodeJS.ProcessEnv;
    let folders: { runDir: string; cacheDir: string };
    let mountPoint: string;

    const dsec = (...args: string[]) =>
      new Promise<Ran>((resolve) => {
        const child = execFile(process.execPath, [DSEC, ...args], { env, maxBuffer: 64 << 20 }, (_, stdout, stderr) =>
          resolve({ status: child.exitCode ?? -1, stdout, stderr }),
        );
      });
    const ok = async (...args: string[]) => {
      const ran = await dsec(...args);
      expect({ args, ...ran }).toMatchObject({ status: 0 });
      return ran.stdout;
    };
    // biome-ignore lint/suspicious/noExplicitAny: answers of many shapes
    const json = async (...args: string[]): Promise<any> => JSON.parse(await ok(...args, '--json'));
    /** Chunks of a file in its data blob, as its extents say. */
    const chunksOf = async (image: string, path: string): Promise<number[]> => {
      const { extents } = (await json('stat', image, path)) as {
        extents: { device: number; offset: number; storedLength: number }[];
      };
      return extents.flatMap(({ device, offset, storedLength }) => {
        if (device === 0 || storedLength === 0) return [];
        const [first, last] = [Math.floor(offset / CHUNK), Math.floor((offset + storedLength - 1) / CHUNK)];
        return Array.from({ length: last - first + 1 }, (_, i) => first + i);
      });
    };
    const waitFor = async (holds: () => boolean | Promise<boolean>) => {
      const until = performance.now() + WAIT_MS;
      while (!(await holds())) {
        if (performance.now() > until) throw new Error('it did not come about');
        await delay(50);
      }
    };
    const cacheStats = async () => {
      const server = (await findDataServer(store.url, folders))!;
      const { cache, prefetching } = await server.stats();
      return { ...(cache as { interactiveReads: number; prefetchReads: number; prefetchBytes: number }), prefetching };
    };
    const freshNode = async () => {
      await stopDataServers({ ...folders, force: true });
      rmSync(folders.cacheDir, { recursive: true, force: true });
    };

    beforeAll(async () => {
      root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-trace-cli-')));
      const tree = join(root, 'tree');
      for (const name of ['bin', 'dev', 'proc', 'sys', 'tmp', 'many', 'etc'])
        mkdirSync(join(tree, name), { recursive: true });
      copyFileSync(BUSYBOX, join(tree, 'bin/busybox'));
      for (const name of ['sh', 'cat', 'sleep', 'echo']) symlinkSync('busybox', join(tree, 'bin', name));
      for (let i = 0; i < 200; i++)
        writeFileSync(join(tree, 'many', `f${i}`), someBytes(20_000 + i * 701, `file ${i}`));
      writeFileSync(join(tree, 'small'), 'all of it is in the metadata');
      const tool = join(root, 'tool');
      mkdirSync(join(tool, 'opt'), { recursive: true });
      writeFileSync(join(tool, 'opt/data'), someBytes(400_000, 'tool'));
      store = await start(root);
      folders = { runDir: join(root, 'run'), cacheDir: join(root, 'cache') };
      mountPoint = join(root, 'mnt');
      mkdirSync(mountPoint);
      Object.assign(process.env, S3_KEYS);
      env = {
        ...process.env,
        DSEC_STORE: store.url,
        DSEC_RUN: folders.runDir,
        DSEC_CACHE: folders.cacheDir,
        DSEC_STATE: join(root, 'state'),
      };
      await ok('convert', `dir:${tree}`, '--name', 'many:1');
      await ok('convert', `dir:${tool}`, '--name', 'tool:1', '--kind', 'toolkit');
    }, 300_000);
    afterAll(async () => {
      await dsec('umount', mountPoint);
      await stopDataServers({ ...folders, force: true });
      await store?.stop();
      for (const { mountPoint: at } of readMountInfo().reverse())
        if (at.startsWith(`${root}/`)) umount(at, { lazy: true });
      rmSync(root, { recursive: true, force: true });
      for (const name of Object.keys(S3_KEYS)) delete process.env[name];
    });

    const FILES = ['/many/f150', '/many/f3', '/many/f77'];

    test('a trace of a known command has exactly the files it read, in order, and their chunks', async () => {
      const traced = await dsec(
        'trace',
        'many:1',
        '--as',
        'known',
        '--',
        'sh',
        '-c',
        `cat ${FILES.join(' ')} /small >/dev/null; echo done`,
      );
      expect(traced).toMatchObject({ status: 0, stdout: 'done\n' });
      const trace = (await json('trace', 'show', 'many:1')) as {
        image: string;
        chunks: [number, number, number][];
        files: { path: string; ranges: [number, number][] }[];
      };
      expect(trace.image).toBe((await json('inspect', 'many:1')).digest);
      expect(trace.files.map(({ path }) => path)).toEqual(['/bin/busybox', ...FILES]);
      const chunks = trace.chunks.map(([, chunk]) => chunk);
      for (const path of FILES) expect(chunks).toEqual(expect.arrayContaining(await chunksOf('many:1', path)));
      const possible = new Set(
        (await Promise.all(['/bin/busybox', ...FILES].map((path) => chunksOf('many:1', path)))).flat(),
      );
      expect(chunks.filter((chunk) => !possible.has(chunk))).toEqual([]);
      const times = trace.chunks.map(([, , ms]) => ms);
      expect(times).toEqual([...times].sort((a, b) => a - b));
      const [row] = (await json('inspect', 'many:1')).traces;
      expect(row).toMatchObject({ name: 'known', chunks: chunks.length, files: 4 });
      expect((await dsec('trace', 'show', 'many:1')).stdout).toContain('/many/f150');
      // Nothing of it is left on the node.
      for (const folder of [folders.runDir, folders.cacheDir, join(root, 'state')]) {
        expect(readdirSync(join(folder, 'traces'))).toEqual([]);
      }
    });

    test('the next lazy mount fetches it ahead: reading the same is no fetch that a reader waits for', async () => {
      await freshNode();
      await ok('mount', '--lazy', 'many:1', mountPoint);
      await waitFor(async () => (await cacheStats()).prefetching === 0);
      expect(await cacheStats()).toMatchObject({ interactiveReads: 0 });
      expect((await cacheStats()).prefetchReads).toBeGreaterThan(0);
      for (const path of ['bin/busybox', ...FILES]) {
        expect(readFileSync(join(mountPoint, path)).equals(readFileSync(join(root, 'tree', path)))).toBe(true);
      }
      expect(await cacheStats()).toMatchObject({ interactiveReads: 0 });
      await ok('umount', mountPoint);
    });

    alsoLocal(
      'stats tell read, prefetched and cold apart, the same from a server and from the disk, and draw a map',
      async () => {
        await freshNode();
        await ok('mount', '--lazy', 'many:1', mountPoint);
        await waitFor(async () => (await cacheStats()).prefetching === 0);
        readFileSync(join(mountPoint, FILES[0]!));
        readFileSync(join(mountPoint, 'many/f120'));
        const svg = join(root, 'map.svg');
        const stats = await json('stats', 'many:1', '--depth', '2', '--svg', svg);
        const wanted = new Set([...(await chunksOf('many:1', FILES[0]!)), ...(await chunksOf('many:1', '/many/f120'))]);
        const [blob] = stats.blobs;
        const digits = [...(blob.chunks as string)].map(Number);
        for (const chunk of wanted) expect(digits[chunk]).toBe(2);
        const traced = ((await json('trace', 'show', 'many:1')).chunks as [number, number][]).map(([, chunk]) => chunk);
        for (const chunk of traced) if (!wanted.has(chunk)) expect(digits[chunk]).toBeGreaterThanOrEqual(1);
        expect(digits.filter((digit) => digit === 0).length).toBeGreaterThan(0);
        expect(stats.sizeBytes).toBe(stats.readBytes + stats.prefetchedBytes + stats.coldBytes);
        const many = stats.directories.find(({ path }: { path: string }) => path === '/many');
        expect(many.readBytes).toBeGreaterThan(0);
        const drawn = readFileSync(svg, 'utf8');
        for (const word of ['hot: read', 'prefetched', 'cold', 'many:1', '<line']) expect(drawn).toContain(word);
        await ok('umount', mountPoint);
        await (await findDataServer(store.url, folders))!.stop();
        // A server that was killed wrote down what it had read some seconds ago; this one has fetched all that it shows.
        const later = await json('stats', 'many:1', '--depth', '2');
        expect(later.from).toBe('disk');
        expect(later.coldBytes).toBe(stats.coldBytes);
        expect((await dsec('stats', 'many:1')).stdout).toContain('cache on disk');
        await freshNode();
        expect(await json('stats', 'many:1')).toMatchObject({ from: 'nothing', readBytes: 0, prefetchedBytes: 0 });
      },
    );

    alsoLocal('--no-prefetch fetches nothing ahead; run takes the trace as mount does', async () => {
      await freshNode();
      await ok('mount', '--lazy', '--no-prefetch', 'many:1', mountPoint);
      expect(await cacheStats()).toMatchObject({ interactiveReads: 0, prefetchReads: 0 });
      await ok('umount', mountPoint);
      await freshNode();
      expect(await ok('run', '--lazy', 'many:1', '--', 'sh', '-c', `cat ${FILES[1]} >/dev/null; echo ran`)).toBe(
        'ran\n',
      );
      await waitFor(async () => (await cacheStats()).prefetching === 0);
      expect((await cacheStats()).prefetchReads).toBeGreaterThan(0);
    });

    alsoLocal('a command that fails leaves no trace, and passes its status on', async () => {
      const failed = await dsec('trace', 'many:1', '--as', 'failing', '--', 'sh', '-c', 'exit 3');
      expect(failed).toMatchObject({ status: 3, stderr: expect.stringContaining('no trace') as string });
      expect(await dsec('trace', 'many:1', '--', '/no/such')).toMatchObject({ status: 127 });
      expect((await json('trace', 'ls', 'many:1')).map(({ name }: { name: string }) => name)).toEqual(['known']);
      const kept = await dsec(
        'trace',
        'many:1',
        '--as',
        'failing',
        '--any-status',
        '--json',
        '--',
        'sh',
        '-c',
        'exit 3',
      );
      expect(kept.status).toBe(3);
      expect(JSON.parse(kept.stderr.trim().split('\n').at(-1)!)).toMatchObject({
        exitCode: 3,
        traces: [{ name: 'failing' }],
      });
      await ok('trace', 'rm', 'many:1', 'failing');
      expect(await dsec('trace', 'rm', 'many:1', 'failing')).toMatchObject({ status: 4 });
    });

    alsoLocal('what does not end is ended, and several traces are used as one', async () => {
      const stopped = await dsec(
        'trace',
        'many:1',
        '--as',
        'long',
        '--stop-after',
        '1s',
        '--',
        'sh',
        '-c',
        'cat /many/f9 >/dev/null; sleep 600',
      );
      expect(stopped).toMatchObject({ status: 0 });
      const { files } = await json('trace', 'show', 'many:1');
      expect(files.map(({ path }: { path: string }) => path).sort()).toEqual(
        ['/bin/busybox', ...FILES, '/many/f9'].sort(),
      );
      expect((await json('trace', 'show', 'many:1', 'long')).files).toHaveLength(2);
      await ok('trace', 'rm', 'many:1', 'long');
    });

    alsoLocal('what a toolkit reads is kept with the toolkit', async () => {
      await ok('trace', 'many:1', '--toolkit', 'tool:1', '--as', 'both', '--', 'cat', '/opt/data');
      expect((await json('trace', 'show', 'tool:1')).files.map(({ path }: { path: string }) => path)).toEqual([
        '/opt/data',
      ]);
      expect((await json('trace', 'show', 'many:1', 'both')).files.map(({ path }: { path: string }) => path)).toEqual([
        '/bin/busybox',
      ]);
      await ok('trace', 'rm', 'many:1', 'both');
      await ok('trace', 'rm', 'tool:1', '--all');
    });

    alsoLocal('killed in its middle it leaves no trace, and after the next command nothing at all', async () => {
      const child = spawn(process.execPath, [DSEC, 'trace', 'many:1', '--as', 'killed', '--', 'sleep', '7654'], {
        env,
        stdio: 'ignore',
      });
      const sleeping = () => {
        try {
          return execFileSync('pgrep', ['-f', '^sleep 7654$'], { encoding: 'utf8' }).trim() !== '';
        } catch {
          return false;
        }
      };
      await waitFor(sleeping);
      child.kill('SIGKILL');
      await waitFor(() => child.signalCode !== null);
      expect((await json('trace', 'ls', 'many:1')).map(({ name }: { name: string }) => name)).toEqual(['known']);
      await ok('mounts');
      expect(sleeping()).toBe(false);
      const traces = join(folders.runDir, 'traces');
      expect(readdirSync(traces)).toEqual([]);
      expect(readMountInfo().filter((row) => row.mountPoint.startsWith(`${traces}/`))).toEqual([]);
      expect(readdirSync(join(folders.cacheDir, 'traces'))).toEqual([]);
      expect(readdirSync(join(root, 'state/traces'))).toEqual([]);
      await waitFor(() => {
        const line = `${traces}/`;
        return !readdirSync('/proc').some((pid) => {
          if (!/^\d+$/.test(pid) || !existsSync(`/proc/${pid}/cmdline`)) return false;
          try {
            return readFileSync(`/proc/${pid}/cmdline`, 'latin1').includes(line);
          } catch {
            return false;
          }
        });
      });
    });

    alsoLocal('an image laid out by a trace has those files first, in order, and starts with fewer reads', async () => {
      const file = join(root, 'known.trace');
      writeFileSync(file, await ok('trace', 'show', 'many:1', '--json'));
      const laid = await json('convert', `dir:${root}/tree`, '--name', 'many:laid', '--profile', 'many:1');
      const again = await json('convert', `dir:${root}/tree`, '--name', 'many:again', '--profile', file);
      expect(again.digest).toBe(laid.digest);
      expect(laid.digest).not.toBe((await json('inspect', 'many:1')).digest);
      expect(await ok('diff', 'many:1', 'many:laid')).toBe('');
      const offsets: number[] = [];
      for (const path of ['/bin/busybox', ...FILES]) {
        offsets.push((await json('stat', 'many:laid', path)).extents[0].offset);
      }
      expect(offsets[0]).toBe(0);
      expect(offsets).toEqual([...offsets].sort((a, b) => a - b));
      expect((await json('verify', 'many:laid')).ok).toBe(true);
      // The trace is of another image.
      expect(await dsec('convert', `dir:${root}/tree`, '--name', 'x:1', '--profile', 'many:laid')).toMatchObject({
        status: 4,
      });
      const damaged = await dsec('convert', `dir:${root}/tree`, '--name', 'x:1', '--profile', DSEC);
      expect(damaged).toMatchObject({ status: 3, stderr: expect.stringContaining('no trace') as string });
      expect((await json('images')).map(({ name }: { name: string }) => name)).not.toContain('x:1');
    });

    alsoLocal('sync takes traces along, and says what share of the accesses it covers', async () => {
      const to = `file://${root}/elsewhere`;
      const synced = await json('sync', '--to', to, '--traces');
      expect(synced.images.map(({ name }: { name: string }) => name)).toEqual(['many:1']);
      expect(synced).toMatchObject({ copiedTraces: 1, coverage: { tracedImages: 1, coveredImages: 1 } });
      expect(synced.coverage.coveredAccesses).toBe(synced.coverage.accesses);
      expect((await json('trace', 'show', 'many:1', '--store', to)).files).toHaveLength(4);
      expect((await dsec('sync', '--to', to, '--traces')).stdout).toContain('covers 100.0 %');
      expect(await dsec('sync', '--to', to)).toMatchObject({ status: 2 });
    });
  });
});
