/** A full machine, from a graphical Linux made of Debian's packages to its end: by its screen, its keyboard and its serial console alone. */
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import * as fs from 'node:fs';
import { homedir, tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { setTimeout as delay } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import type { FastifyInstance } from 'fastify';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findAgent, SandboxNode } from '#runtime';
import { openPort } from '../runtime-service/port-client.ts';
import { SandboxClient, sandboxSocket } from '../runtime-service/sandbox-client.ts';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';

const ROOT = fileURLToPath(new URL('../..', import.meta.url));
const SCRIPT = join(ROOT, 'scripts/desktop-image.mjs');
const MINUTES = 60_000;

/** Made once and kept with the lab's things. Undefined, with the reason printed, where it cannot be. */
function desktopDisk(): string | undefined {
  const cache = process.env.DSEC_LAB_CACHE ?? join(homedir(), '.cache/dsec/lab');
  const key = createHash('sha256').update(fs.readFileSync(SCRIPT)).digest('hex').slice(0, 12);
  const path = join(cache, `desktop-${key}.raw`);
  const skipped = (reason: string) => {
    console.log(`full machines are not tested: ${reason}`);
    return undefined;
  };
  if (process.getuid?.() !== 0) return skipped('needs root');
  if (findAgent() === undefined) return skipped('dsec-agent is not built');
  if (!fs.existsSync('/usr/bin/qemu-system-x86_64') || !fs.existsSync('/usr/bin/qemu-img'))
    return skipped('there is no QEMU');
  if (fs.existsSync(path)) return path;
  try {
    execFileSync(process.execPath, [SCRIPT, path], { stdio: ['ignore', 'pipe', 'pipe'] });
    return path;
  } catch (error) {
    return skipped(String((error as { stderr?: Buffer }).stderr ?? error).slice(-400));
  }
}

const disk = desktopDisk();

describe.skipIf(disk === undefined)('a full machine', { timeout: 15 * MINUTES }, () => {
  let folder: string;
  let node: SandboxNode;
  let app: FastifyInstance;
  let client: SandboxClient;
  const saved = { ...process.env };

  async function openService(): Promise<void> {
    node = await SandboxNode.open({ agent: findAgent()! });
    app = await sandboxApp(node);
    await app.listen({ path: sandboxSocket(process.env.DSEC_RUN!) });
    client = new SandboxClient();
  }
  async function closeService(): Promise<void> {
    await app.close();
    await node.close();
    fs.rmSync(sandboxSocket(process.env.DSEC_RUN!), { force: true });
  }
  const consoleText = async () => {
    const parts: Buffer[] = [];
    for await (const part of client.console('desk', false)) parts.push(part);
    return Buffer.concat(parts).toString('latin1');
  };
  async function said(text: string): Promise<void> {
    const until = performance.now() + 10 * MINUTES;
    while (!(await consoleText()).includes(text)) {
      if (performance.now() > until) throw new Error(`the machine has not said ${text}, but: ${await consoleText()}`);
      await delay(200);
    }
  }
  const type = (text: string) => client.act('desk', [{ type: 'text', text }]);

  beforeAll(async () => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-full-'));
    for (const name of ['STORE', 'STATE', 'RUN', 'CACHE', 'DISKS'])
      process.env[`DSEC_${name}`] = join(folder, name.toLowerCase());
    const dsec = (...args: string[]) => execFileSync(join(ROOT, 'bin/dsec'), args, { env: process.env });
    dsec('disk', 'create', 'desktop', '--from', `raw:${disk}`);
    dsec('disk', 'pack-diff', 'desktop', '--name', 'desktop:1');
    dsec('disk', 'rm', 'desktop');
    await openService();
    const store = `file://${process.env.DSEC_STORE}`;
    const made = await client.create({
      backend: 'vm',
      store,
      image: 'desktop:1',
      name: 'desk',
      memoryBytes: 384 << 20,
    });
    expect(made).toMatchObject({ name: 'desk', backend: 'vm', state: 'running' });
    await said('desktop-is-ready');
  }, 15 * MINUTES);

  afterAll(async () => {
    await client?.remove('desk', true).catch(() => {});
    if (app !== undefined) await closeService();
    process.env = saved;
    if (folder !== undefined) fs.rmSync(folder, { recursive: true, force: true });
    expect(fs.readdirSync('/dev/shm').filter((name) => name.startsWith('dsec-vm-desk-'))).toEqual([]);
  }, 5 * MINUTES);

  it('shows what is typed, on its screen and in the machine', async () => {
    const before = await client.screenshot('desk');
    expect([before.readUInt32BE(16), before.readUInt32BE(20)]).toEqual([1024, 768]);
    await type('echo \'It is: $(1+1) "ok" ~{}|\\\' > /dev/ttyS0\n');
    await said('It is: $(1+1) "ok" ~{}|\\');
    const after = await client.screenshot('desk');
    expect(after.equals(before)).toBe(false);
    await client.act('desk', [
      { type: 'key', keys: ['ctrl', 'l'] },
      { type: 'text', text: 'kept=of-before\n' },
    ]);
  });

  it('takes the mouse, and refuses what is not on the screen before anything is done', async () => {
    await client.writeConsole(
      'desk',
      Readable.from([Buffer.from('dd if=/dev/input/tablet bs=24 count=2 2>/dev/null | wc -c | sed s/^/read:/\n')]),
    );
    // Until whoever reads has come.
    const until = performance.now() + 5 * MINUTES;
    for (let x = 1; !/read:\d/.test(await consoleText()); x += 7) {
      await client.act('desk', [{ type: 'move', x: x % 1000, y: 300 }]);
      expect(performance.now()).toBeLessThan(until);
    }
    await client.act('desk', [
      { type: 'click', x: 400, y: 300, button: 'right', count: 2 },
      { type: 'scroll', steps: -2 },
    ]);
    for (const wrong of [
      { type: 'click', x: 1024, y: 0 },
      { type: 'click', x: 5 },
      { type: 'key', keys: ['nokey'] },
      { type: 'text', text: 'ä' },
    ] as const) {
      const sent = client.act('desk', [{ type: 'text', text: 'x' }, wrong]);
      await expect(sent, JSON.stringify(wrong)).rejects.toMatchObject({ code: 'VM_INPUT' });
    }
    await expect(client.act('desk', [{ type: 'scroll', steps: 1e9 }])).rejects.toMatchObject({
      code: 'SANDBOX_BAD_REQUEST',
    });
  });

  it('speaks VNC at port 5900, and has no other', async () => {
    const vnc = await openPort('desk', 5900);
    const [hello] = (await once(vnc, 'data')) as [Buffer];
    expect(hello.toString()).toMatch(/^RFB 003\.\d{3}\n/);
    vnc.destroy();
    await expect(openPort('desk', 80)).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
  });

  it('says what it lacks', async () => {
    await expect(client.exec('desk', { args: ['true'] })).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
    await expect(client.stat('desk', '/')).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
    await expect(client.fork('desk', {})).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
    const store = `file://${process.env.DSEC_STORE}`;
    for (const more of [{ network: { mode: 'host' } }, { env: ['A=1'] }, { pids: 5 }]) {
      const create = client.create({ backend: 'vm', store, image: 'desktop:1', ...more });
      await expect(create, JSON.stringify(more)).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
    }
  });

  it('stays when the service goes, and goes on where it was after a pause', async () => {
    await closeService();
    await openService();
    expect(await client.get('desk')).toMatchObject({ state: 'running' });
    await type('echo still-$kept > /dev/ttyS0\n');
    await said('still-of-before');
    await client.pause('desk');
    expect(await client.get('desk')).toMatchObject({ state: 'paused' });
    await closeService();
    await openService();
    expect(await client.get('desk')).toMatchObject({ state: 'paused' });
    // Whoever wants to see it resumes it.
    await client.screenshot('desk');
    expect(await client.get('desk')).toMatchObject({ state: 'running' });
    await type('echo again-$kept > /dev/ttyS0\n');
    await said('again-of-before');
    await client.pause('desk');
    await client.resume('desk');
    await type('sha256sum /usr/bin/busybox > /dev/ttyS0; echo read-$kept > /dev/ttyS0\n');
    await said('read-of-before');
  });

  it('is switched off as by its button, and leaves nothing', async () => {
    const end = await client.stop('desk', 5 * MINUTES);
    expect(end).toMatchObject({ reason: 'stopped' });
    await expect(client.screenshot('desk')).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
    await client.remove('desk', false);
    expect(fs.readdirSync(join(process.env.DSEC_STATE!, 'sandboxes')).filter((name) => !name.startsWith('.'))).toEqual(
      [],
    );
  });
});
