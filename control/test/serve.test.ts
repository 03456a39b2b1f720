/** `dsec serve imagesvc` as a process, killed and ended, and `dsec convert --server`, `gc`, `sync` as a user types them. */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, realpathSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { digestOf } from '#base';
import { ImageServiceClient, openStore } from '#imagesvc';

const PROGRAM = fileURLToPath(new URL('../../bin/dsec', import.meta.url));

interface Ended {
  readonly status: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly stdout: string;
  readonly stderr: string;
}

describe('the image service as a process', { timeout: 180_000 }, () => {
  let root: string;
  let url: string;
  let server: ChildProcess | undefined;
  let source: string;
  const children = new Set<ChildProcess>();

  function start(...args: string[]): { child: ChildProcess; ended: Promise<Ended> } {
    const child = spawn(process.execPath, [PROGRAM, ...args], {
      env: {
        ...process.env,
        DSEC_STORE: `file://${root}/store`,
        DSEC_STATE: join(root, 'state'),
        DSEC_RUN: join(root, 'run'),
        DSEC_CACHE: join(root, 'cache'),
        DSEC_TOKEN: 'ci-token',
        DSEC_SERVER_TOKEN: '',
      },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    children.add(child);
    let [stdout, stderr] = ['', ''];
    child.stdout!.setEncoding('utf8').on('data', (text: string) => {
      stdout += text;
    });
    child.stderr!.setEncoding('utf8').on('data', (text: string) => {
      stderr += text;
    });
    const ended = new Promise<Ended>((done) => {
      child.once('close', (status, signal) => {
        children.delete(child);
        done({ status, signal, stdout, stderr });
      });
    });
    return { child, ended };
  }

  const dsec = (...args: string[]) => start(...args).ended;

  async function serve(): Promise<{ child: ChildProcess; ended: Promise<Ended> }> {
    const socket = join(root, 'socket');
    const started = start(
      ...['serve', 'imagesvc', '--listen', `unix:${socket}`, '--token-file', join(root, 'tokens')],
      ...['--allow-path', root, '--drain', '0'],
    );
    server = started.child;
    url = `unix:${socket}`;
    await new Promise<void>((done, failed) => {
      started.child.stdout!.on('data', (text: string) => text.includes('image service at') && done());
      started.ended.then(({ stderr }) => failed(new Error(stderr)));
    });
    return started;
  }

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-serve-')));
    writeFileSync(join(root, 'tokens'), `ci write ${digestOf('ci-token')}\nboss admin ${digestOf('boss-token')}\n`);
    mkdirSync(join(root, 'tree'));
    for (let i = 0; i < 40; i++) writeFileSync(join(root, `tree/${i}`), Buffer.alloc(1_500_000, `${i} of them `));
    source = `dir:${root}/tree`;
    await serve();
  });
  afterAll(async () => {
    for (const child of children) child.kill('SIGKILL');
    await delay(50);
    rmSync(root, { recursive: true, force: true });
  });

  const client = (token = 'ci-token') => new ImageServiceClient({ url, token });

  it('converts for the command line, as a local conversion would', async () => {
    mkdirSync(join(root, 'small'));
    writeFileSync(join(root, 'small/file'), 'content');
    const there = await dsec('convert', `dir:${root}/small`, '--name', 'small:1', '--server', url, '--json');
    expect(there.status, there.stderr).toBe(0);
    const here = await dsec('convert', `dir:${root}/small`, '--name', 'here:1', '--json');
    const [a, b] = [JSON.parse(there.stdout), JSON.parse(here.stdout)];
    expect(Object.keys(a).sort()).toEqual(Object.keys(b).sort());
    expect(a).toEqual({ ...b, name: 'small:1' });
    const placed = ['convert', `dir:${root}/small`, '--prefix', '/workspace', '--json'];
    const placedThere = JSON.parse((await dsec(...placed, '--name', 'placed:1', '--server', url)).stdout);
    const placedHere = JSON.parse((await dsec(...placed, '--name', 'placed:2')).stdout);
    expect(placedThere.digest).toBe(placedHere.digest);
    expect(placedThere.digest).not.toBe(a.digest);
    const text = await dsec('convert', `dir:${root}/small`, '--name', 'small:1', '--server', url);
    expect(text.stdout).toMatch(/^small:1: sha256:[0-9a-f]{64}\n1 EROFS layer, 2 inodes, /);
    expect(statSync(join(root, 'socket')).mode & 0o777).toBe(0o600);
  });

  it('fails as a local conversion would, with its exit status', async () => {
    for (const [args, status, code] of [
      [['convert', `tar:${root}/tokens`, '--name', 'a:1', '--server', url], 3, 'TAR_'],
      [['convert', `tar:${root}/none`, '--name', 'a:1', '--server', url], 4, 'SOURCE_'],
      [['convert', 'dir:/etc', '--name', 'a:1', '--server', url], 5, 'SERVER_PATH_DENIED'],
      [['convert', source, '--name', 'a:1', '--server', url, '--token', 'wrong'], 5, 'SERVER_UNAUTHORIZED'],
      [['convert', source, '--name', 'UPPER', '--server', url], 2, 'STORE_NAME'],
      [['convert', source, '--name', 'a:1', '--server', 'gopher:x'], 2, 'SERVER_URL'],
      [['convert', source, '--name', 'a:1', '--server', url, '--store', '/x'], 2, 'CLI_USAGE'],
      [['serve', 'imagesvc', '--listen', '0.0.0.0:0'], 2, 'SERVER_LISTEN_OPEN'],
      [
        ['serve', 'imagesvc', '--listen', 'unix:/run/x', '--state', join(root, 'state/imagesvc')],
        1,
        'SERVER_STATE_BUSY',
      ],
    ] as const) {
      const local = await dsec(...args, ...(args[0] === 'convert' ? ['--json'] : []));
      expect([args, local.status, local.stderr]).toEqual([args, status, local.stderr]);
      if (args[0] === 'convert') expect(JSON.parse(local.stderr).error.code).toMatch(new RegExp(`^${code}`));
    }
  });

  it('converts many, and says which failed', async () => {
    const list = join(root, 'batch');
    writeFileSync(list, `dir:${root}/small many:1\ntar:${root}/none many:2\ndir:${root}/small many:3\n`);
    const { status, stdout } = await dsec('convert', '--batch', list, '--server', url, '--json');
    const rows = stdout
      .trimEnd()
      .split('\n')
      .map((line) => JSON.parse(line));
    expect(rows.map(({ name, digest, error }) => [name, digest !== undefined, error === undefined])).toEqual([
      ['many:1', true, true],
      ['many:2', false, false],
      ['many:3', true, true],
    ]);
    expect(status).toBe(4);
  });

  it('finishes a job after it was killed in the middle of it, and its watcher gets the result', async () => {
    const waiting = dsec('convert', source, '--name', 'killed:1', '--compress', 'deflate', '--server', url, '--json');
    const admin = client('boss-token');
    let id: string | undefined;
    await expect
      .poll(
        async () => {
          const jobs = readdirSync(join(root, 'state/imagesvc/jobs')).filter((name) => name.endsWith('.json'));
          for (const name of jobs) {
            const job = await admin.job(name.slice(0, 24));
            if (job.request.name === 'killed:1' && job.state === 'running') id = job.id;
          }
          return id;
        },
        { timeout: 60_000, interval: 20 },
      )
      .toBeDefined();
    // It stages what it makes: now it is at work.
    await expect.poll(() => readdirSync(join(root, 'store/tmp')).length, { interval: 5 }).toBeGreaterThan(0);
    server!.kill('SIGKILL');
    await delay(100);
    expect(await (await openStore(`file://${root}/store`)).getRef('killed:1')).toBeUndefined();
    await serve();
    const ended = await waiting;
    expect(ended.status, ended.stderr).toBe(0);
    expect(JSON.parse(ended.stdout)).toMatchObject({ name: 'killed:1', kind: 'base' });
    const again = client();
    expect(await again.job(id!)).toMatchObject({ state: 'done', attempt: 2 });
    const verified = await dsec('verify', 'killed:1');
    expect(verified.status, verified.stdout).toBe(0);
    expect(readdirSync(join(root, 'store/tmp'))).toEqual([]);
    await admin.close();
    await again.close();
  });

  it('cancels the job when the command line is interrupted, and nothing stays', async () => {
    const { child, ended } = start('convert', source, '--name', 'stopped:1', '--compress', 'lz4', '--server', url);
    const store = await openStore(`file://${root}/store`);
    await expect
      .poll(() => readdirSync(join(root, 'store/tmp')).length, { timeout: 60_000, interval: 5 })
      .toBeGreaterThan(0);
    child.kill('SIGINT');
    expect((await ended).status).toBe(130);
    const admin = client();
    const names = readdirSync(join(root, 'state/imagesvc/jobs')).filter((name) => name.endsWith('.json'));
    const jobs = await Promise.all(names.map((name) => admin.job(name.slice(0, 24))));
    expect(jobs.find(({ request }) => request.name === 'stopped:1')?.state).toBe('cancelled');
    await admin.close();
    expect(await store.getRef('stopped:1')).toBeUndefined();
    expect(readdirSync(join(root, 'store/tmp'))).toEqual([]);
    const { stdout } = await dsec('gc', '--grace', '0', '--dry-run', '--json');
    // Manifests of names that were taken over by later conversions may be there, no data.
    expect(JSON.parse(stdout).freedBytes).toBeLessThan(100_000);
  });

  it('syncs to another store, and collects what has no name', async () => {
    writeFileSync(join(root, 'names'), '# two of them\nsmall:1\n\nkilled:1\n');
    const other = join(root, 'other');
    const synced = await dsec('sync', '--to', other, '--images', join(root, 'names'), '--json');
    expect(synced.status, synced.stderr).toBe(0);
    expect(JSON.parse(synced.stdout).images).toHaveLength(2);
    expect((await dsec('verify', '--all', '--store', other)).status).toBe(0);
    expect((await dsec('sync', '--to', other, '--images', join(root, 'names'))).stdout).toContain('copied 0 blobs');
    writeFileSync(join(root, 'names'), 'small:1\nBAD NAME\n');
    const bad = await dsec('sync', '--to', other, '--images', join(root, 'names'));
    expect([bad.status, bad.stderr]).toEqual([2, expect.stringContaining('names:2: ')]);
    const store = await openStore(other);
    await store.deleteRef('killed:1');
    expect((await dsec('gc', '--store', other)).stdout).toMatch(
      /^freed 0 blobs, 0 B; [4-9] without a name stay: in use, or younger than --grace 1h\n$/,
    );
    expect((await dsec('gc', '--store', other, '--grace', '0')).stdout).toMatch(
      /^freed [4-9] blobs, .*; 0 without a name stay\n/,
    );
    expect((await dsec('gc', '--grace', 'soon')).status).toBe(2);
    expect((await dsec('verify', '--all', '--store', other)).status).toBe(0);
  });

  it('ends on SIGTERM with status 0 and takes its socket along', async () => {
    const ended = new Promise<number | null>((done) => server!.once('close', done));
    server!.kill('SIGTERM');
    expect(await ended).toBe(0);
    expect(readdirSync(root)).not.toContain('socket');
  });
});
