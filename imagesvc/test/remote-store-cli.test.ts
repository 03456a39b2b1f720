/** bin/dsec with stores that are not folders: an S3 bucket and a registry, each command once. */
import { execFile, spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { LoopbackRegistry } from './loopback-registry.ts';
import { findS3Server, LoopbackS3, S3_KEYS } from './loopback-s3.ts';
import { someBytes } from './store-conformance.ts';

const program = findS3Server('remote-store-cli');
const withRegistry = spawnSync('sh', ['-c', 'command -v docker-registry']).status === 0;

describe.skipIf(program === undefined)('dsec --store s3://', () => {
  let root: string;
  let s3: LoopbackS3;
  let store: string;
  const dsec = (...args: string[]) => dsecAt(store, ...args);
  const dsecAt = (at: string, ...args: string[]) =>
    new Promise<{ status: number; stdout: Buffer; stderr: string }>((resolve) => {
      const env = { ...process.env, ...S3_KEYS, DSEC_CACHE: join(root, 'cache'), DSEC_RUN: join(root, 'run') };
      const path = join(import.meta.dirname, '../../bin/dsec');
      const options = { env, encoding: 'buffer', maxBuffer: 64 << 20 } as const;
      const child = execFile(process.execPath, [path, ...args, '--store', at], options, (_, stdout, stderr) => {
        resolve({ status: child.exitCode ?? -1, stdout, stderr: stderr.toString() });
      });
    });
  const said = async (...args: string[]) => {
    const { status, stdout, stderr } = await dsec(...args);
    expect({ status, stderr }).toMatchObject({ status: 0 });
    expect(stderr).not.toMatch(/Warning|warning/);
    return stdout;
  };
  const json = async (...args: string[]) => JSON.parse((await said(...args, '--json')).toString());

  beforeAll(async () => {
    root = mkdtempSync(join(tmpdir(), 'dsec-remote-'));
    mkdirSync(join(root, 'tree/etc'), { recursive: true });
    writeFileSync(join(root, 'tree/etc/motd'), 'welcome\n');
    writeFileSync(join(root, 'tree/large'), someBytes(3_000_000, 'large'));
    s3 = await LoopbackS3.start(program!, root, 'bucket');
    store = s3.url('bucket', 'images');
  });
  afterAll(async () => {
    await s3?.stop();
    rmSync(root, { recursive: true, force: true });
  });

  test('convert, then everything that reads', async () => {
    await said('convert', `dir:${root}/tree`, '--name', 'web:1');
    writeFileSync(join(root, 'tree/etc/motd'), 'welcome back\n');
    await said('convert', `dir:${root}/tree`, '--name', 'web:2');
    expect((await json('images')).map((image: { name: string }) => image.name)).toEqual(['web:1', 'web:2']);
    expect((await json('inspect', 'web:1')).layers).toHaveLength(1);
    expect((await said('ls', 'web:1', '/')).toString()).toBe('etc\nlarge\n');
    expect((await said('cat', 'web:1', '/large')).equals(readFileSync(join(root, 'tree/large')))).toBe(true);
    expect((await dsec('diff', 'web:1', 'web:2')).stdout.toString()).toContain('/etc/motd');
    expect((await json('verify', 'web:1')).ok).toBe(true);
    const tar = await said('export', 'web:2', '-o', '-');
    expect(tar.includes('welcome back\n')).toBe(true);
  }, 240_000);

  test.skipIf(!withRegistry)(
    'push to a registry, read it there as a store, pull from it',
    async () => {
      const registry = await LoopbackRegistry.start(join(root, 'registry'));
      try {
        await said('push', 'web:1', `docker://${registry.host}/team/web:1`);
        const there = `docker://${registry.host}/team/web`;
        const shown = await dsecAt(there, 'cat', 'web:1', '/etc/motd');
        expect(shown).toMatchObject({ status: 0, stdout: Buffer.from('welcome\n') });
        expect((await dsecAt(there, 'images')).stdout.toString()).toContain('team/web:1');
        expect(await dsecAt(there, 'rm', 'web:1')).toMatchObject({ status: 5 });
        await said('pull', `docker://${registry.host}/team/web:1`, '--name', 'pulled:1');
        expect((await said('cat', 'pulled:1', '/etc/motd')).toString()).toBe('welcome\n');
      } finally {
        await registry.stop();
      }
    },
    240_000,
  );

  test('rm, and what cannot be', async () => {
    await said('rm', 'web:2');
    expect((await json('images')).map((image: { name: string }) => image.name)).not.toContain('web:2');
    const refused = await dsecAt('s3://bucket/images?endpoint=nowhere', 'images');
    expect(refused).toMatchObject({ status: 2, stderr: expect.stringContaining('http://') as string });
    const gone = await dsec('cat', 'web:9', '/etc/motd');
    expect(gone.status).toBe(4);
  }, 120_000);
});
