/** The command line as users run it, bundle and all, against a real registry on loopback. */
import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';

const DSEC = fileURLToPath(new URL('../../bin/dsec', import.meta.url));
const REGISTRY = spawnSync('docker-registry', ['--version']).error === undefined;
const IMAGE_TOOLS = ['umoci', 'skopeo'].every((tool) => spawnSync(tool, ['--version']).error === undefined);
if (!REGISTRY) console.warn('skipped: docker-registry is not installed (apt-get install docker-registry)');

describe.skipIf(!REGISTRY)('bin/dsec and a registry', () => {
  let dir: string;
  let port: number;
  let registry: ReturnType<typeof spawn>;

  const dsec = (...args: string[]) => {
    const env = { ...process.env, DSEC_STORE: `file://${dir}/store`, DSEC_CACHE: `${dir}/cache` };
    const { status, stdout, stderr } = spawnSync(DSEC, args, { env, encoding: 'utf8', maxBuffer: 64 << 20 });
    return { status, stdout, stderr };
  };

  beforeAll(async () => {
    dir = mkdtempSync(join(tmpdir(), 'dsec-registry-command-'));
    port = await new Promise((resolve) => {
      const server = createServer().listen(0, '127.0.0.1', () => {
        const { port } = server.address() as { port: number };
        server.close(() => resolve(port));
      });
    });
    const config = `version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: ${dir}/registry}}\nhttp: {addr: 127.0.0.1:${port}}\n`;
    writeFileSync(join(dir, 'registry.yml'), config);
    registry = spawn('docker-registry', ['serve', join(dir, 'registry.yml')], { stdio: 'ignore' });
    for (let i = 0; i < 100; i++) {
      const up = await fetch(`http://127.0.0.1:${port}/v2/`).then(
        (r) => r.ok,
        () => false,
      );
      if (up) return;
      await delay(100);
    }
    throw new Error('docker-registry does not answer');
  });

  afterAll(async () => {
    const ended = new Promise((resolve) => registry.once('exit', resolve));
    registry.kill();
    await ended;
    rmSync(dir, { recursive: true, force: true });
  });

  test('push and pull work from the bundle', () => {
    const source = join(dir, 'source');
    spawnSync('mkdir', ['-p', source]);
    writeFileSync(join(source, 'hello'), 'hello\n');
    const converted = dsec('convert', `dir:${source}`, '--name', 'hello:1', '--json');
    expect(converted).toMatchObject({ status: 0 });
    const { digest } = JSON.parse(converted.stdout);
    expect(dsec('push', 'hello:1', `docker://127.0.0.1:${port}/hello:1`)).toMatchObject({ status: 0 });
    expect(dsec('rm', 'hello:1')).toMatchObject({ status: 0 });
    expect(dsec('pull', `docker://127.0.0.1:${port}/hello:1`, '--name', 'back:1')).toMatchObject({ status: 0 });
    expect(JSON.parse(dsec('inspect', 'back:1', '--json').stdout).digest).toBe(digest);
    expect(dsec('cat', 'back:1', '/hello').stdout).toBe('hello\n');
  });

  test.skipIf(!IMAGE_TOOLS)('an image that skopeo put there is converted', () => {
    const layout = join(dir, 'layout');
    const run = (command: string, ...args: string[]) =>
      expect(spawnSync(command, args, { encoding: 'utf8' })).toMatchObject({ status: 0 });
    run('umoci', 'init', '--layout', layout);
    run('umoci', 'new', '--image', `${layout}:web`);
    writeFileSync(join(dir, 'big'), Buffer.alloc(3_000_000, 'dsec '));
    run('umoci', 'insert', '--image', `${layout}:web`, join(dir, 'big'), '/big');
    run('skopeo', 'copy', '--dest-tls-verify=false', `oci:${layout}:web`, `docker://127.0.0.1:${port}/web:1`);
    expect(dsec('convert', `docker://127.0.0.1:${port}/web:1`, '--name', 'web:1')).toMatchObject({ status: 0 });
    expect(dsec('cat', 'web:1', '/big').stdout).toBe('dsec '.repeat(600_000));
  });
});
