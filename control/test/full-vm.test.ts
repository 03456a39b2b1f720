/** A full machine, from a graphical Linux made of Debian's packages to its end: by its screen, its keyboard and its serial console alone. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
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
import {
  type ClipboardType,
  type ExecSpec,
  findAgent,
  isUnsupported,
  type NodeSandbox,
  SandboxNode,
  type Selection,
} from '#runtime';
import { openPort } from '../runtime-service/port-client.ts';
import { SandboxClient, sandboxSocket } from '../runtime-service/sandbox-client.ts';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';
import { NetworkNodes } from './network-nodes.ts';
import { takeOwnNetwork } from './own-network.ts';

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
  let net: NetworkNodes;
  let site: string;
  let server: ChildProcess;
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
  const desk = (): NodeSandbox => node.get('desk');
  /** Once an agent answers in it. */
  async function answers(): Promise<void> {
    for (const until = performance.now() + 10 * MINUTES; ; await delay(300)) {
      const error = await desk()
        .exec({ args: ['true'] })
        .then(
          () => undefined,
          (thrown: unknown) => thrown,
        );
      if (error === undefined) return;
      if (!isUnsupported(error) || performance.now() > until) throw error;
    }
  }
  async function run(
    script: string,
    stdin?: string,
    machine = desk(),
  ): Promise<{ text: string; errors: string; exitCode: number }> {
    const command = await machine.exec({ args: ['sh', '-c', script], stdin: stdin !== undefined });
    if (stdin !== undefined) {
      await command.write(Buffer.from(stdin));
      await command.closeStdin();
    }
    const said = { stdout: '', stderr: '' };
    for await (const { stream, bytes } of command.output()) said[stream] += bytes;
    return { text: said.stdout, errors: said.stderr, exitCode: (await command.wait()).exitCode };
  }
  /** What a server of the network says; empty: it is not reached. */
  const reach = async (port: number) =>
    (await run(`printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 30 ${site} ${port} | tail -n 1`)).text;
  const type = (text: string) => client.act('desk', [{ type: 'text', text }]);

  beforeAll(async () => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-full-'));
    for (const name of ['STORE', 'STATE', 'RUN', 'CACHE', 'DISKS'])
      process.env[`DSEC_${name}`] = join(folder, name.toLowerCase());
    const dsec = (...args: string[]) => execFileSync(join(ROOT, 'bin/dsec'), args, { env: process.env });
    dsec('disk', 'create', 'desktop', '--from', `raw:${disk}`);
    dsec('disk', 'pack-diff', 'desktop', '--name', 'desktop:1');
    dsec('disk', 'rm', 'desktop');
    takeOwnNetwork();
    net = new NetworkNodes();
    site = net.add('web', 1);
    const says = "require('http').createServer((_, answer) => answer.end('from the net')).listen(PORT)";
    const script = [80, 81].map((port) => says.replace('PORT', String(port))).join(';');
    const [program, ...line] = [...net.at('web'), process.execPath, '-e', script];
    server = spawn(program!, line, { stdio: 'ignore' });
    execFileSync(net.at('web')[0]!, [...net.at('web').slice(1), 'ip', 'route', 'add', 'default', 'via', net.here]);
    await openService();
    const store = `file://${process.env.DSEC_STORE}`;
    const made = await client.create({
      backend: 'vm',
      store,
      image: 'desktop:1',
      name: 'desk',
      memoryBytes: 384 << 20,
      network: { mode: 'policy', policy: { default: 'deny', rules: [{ allow: site, ports: [80] }] } },
    });
    expect(made).toMatchObject({ name: 'desk', backend: 'vm', state: 'running' });
    await said('desktop-is-ready');
  }, 15 * MINUTES);

  afterAll(async () => {
    await client?.remove('desk', true).catch(() => {});
    if (app !== undefined) await closeService();
    server?.kill('SIGKILL');
    net?.remove();
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

  it('has commands and files by the agent of its guest', async () => {
    await answers();
    expect(await run('cat; echo err >&2; exit 3', 'some input')).toEqual({
      text: 'some input',
      errors: 'err\n',
      exitCode: 3,
    });
    expect((await run('head -c 3000000 /dev/zero | tr "\\0" z')).text).toBe('z'.repeat(3_000_000));
    await expect(client.exec('desk', { args: ['no-such-program'] })).rejects.toMatchObject({
      code: 'RUNTIME_COMMAND_NOT_FOUND',
    });
    const sleeping = await desk().exec({ args: ['sleep', '1000'], timeoutMs: 500 });
    expect(await sleeping.wait()).toMatchObject({ timedOut: true, signal: 'SIGKILL' });
    const { files } = desk();
    const bytes = Buffer.from(Array.from({ length: 2_500_000 }, (_, at) => at % 251));
    await files.write('/root/bytes', bytes);
    expect((await files.read('/root/bytes')).equals(bytes)).toBe(true);
    expect((await run('sha256sum < /root/bytes')).text).toContain(createHash('sha256').update(bytes).digest('hex'));
    expect(await client.stat('desk', '/root/bytes')).toMatchObject({ kind: 'file', size: bytes.length });
    await expect(files.read('/none')).rejects.toMatchObject({ code: 'RUNTIME_FILE', params: { code: 'ENOENT' } });
    await expect(files.list('/')).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
  });

  it('runs commands with the environment, user and folder that are asked for', async () => {
    const shown = 'printf "%s|%s|%s|%s|" "$ODD" "$HOME" "$PWD" "$*"; id -u; id -g; id -G';
    const said = async (more: Partial<ExecSpec>) => {
      const command = await desk().exec({ args: ['sh', '-c', shown, 'sh', "it's", '$(x) \\'], ...more });
      const parts: string[] = [];
      for await (const { bytes } of command.output()) parts.push(String(bytes));
      expect((await command.wait()).exitCode).toBe(0);
      return parts.join('');
    };
    const odd = ' "two"\n=lines\'$ä ';
    expect(await said({ env: [`ODD=${odd}`], cwd: '/usr/share' })).toBe(
      `${odd}|/root|/usr/share|it's $(x) \\|0\n0\n0\n`,
    );
    expect(await said({ user: 'user', cwd: '/home' })).toBe("|/home/user|/home|it's $(x) \\|1000\n1000\n1000 5\n");
    expect(await said({ user: '1234:5', env: ['HOME=/tmp'], cwd: '/' })).toBe("|/tmp|/|it's $(x) \\|1234\n5\n5\n");
    const last = (await client.commands('desk')).at(-1);
    expect(last?.args?.slice(0, 2)).toEqual(['sh', '-c']);
    const refused = [
      [{ args: ['true'], user: 'nobody-here' }, 'RUNTIME_USER'],
      [{ args: ['true'], cwd: '/none' }, 'RUNTIME_COMMAND_NOT_EXECUTABLE'],
      [{ args: ['none'], cwd: '/' }, 'RUNTIME_COMMAND_NOT_FOUND'],
    ] as const;
    for (const [spec, code] of refused) await expect(desk().exec(spec)).rejects.toMatchObject({ code });
  });

  it('has the clipboard of its guest, over pauses and restarts of the service', async () => {
    const paste = (selection: string, more = '') => run(`DISPLAY=:0 xclip -o -selection ${selection} ${more}`);
    const get = (selection: Selection = 'clipboard', type: ClipboardType = 'text/plain') =>
      client.clipboard('desk', type, selection);
    const set = (text: string, selection: Selection = 'clipboard') =>
      client.setClipboard('desk', 'text/plain', selection, Buffer.from(text));
    const soon = async (what: string, isThere: () => Promise<boolean>) => {
      for (const until = performance.now() + 5 * MINUTES; !(await isThere()); await delay(300)) {
        if (performance.now() > until) throw new Error(`not there: ${what}`);
      }
    };
    const pasted = (text: string, selection: string) =>
      soon(`${text}, pasted`, async () => (await paste(selection)).text === text);
    await soon('an agent of SPICE', async () => {
      const error = await get().then(
        () => undefined,
        (thrown: unknown) => thrown,
      );
      if (error !== undefined && !isUnsupported(error)) throw error;
      return error === undefined;
    });
    await set('grüße\nfrom here');
    await pasted('grüße\nfrom here', 'clipboard');
    expect(String(await get())).toBe('grüße\nfrom here');
    const long = 'long '.repeat(100_000);
    await set(long, 'primary');
    await pasted(long, 'primary');
    const picture = await client.screenshot('desk');
    await client.setClipboard('desk', 'image/png', 'clipboard', picture);
    const digest = createHash('sha256').update(picture).digest('hex');
    await soon('a picture, pasted', async () =>
      (await run('DISPLAY=:0 xclip -o -selection clipboard -t image/png | sha256sum')).text.startsWith(digest),
    );
    const copy = 'printf "%s" "of the guest" | DISPLAY=:0 xclip -selection clipboard >/dev/null 2>&1';
    await run(copy);
    await soon('what was copied', async () => String(await get()) === 'of the guest');
    expect(await get('clipboard', 'image/png')).toBeUndefined();
    await client.pause('desk');
    await client.resume('desk');
    expect(String(await get())).toBe('of the guest');
    await pasted('of the guest', 'clipboard');
    await pasted(long, 'primary');
    await closeService();
    await openService();
    await pasted(long, 'primary');
    await set('later');
    await pasted('later', 'clipboard');
    for (const [type, bytes] of [
      ['text/plain', Buffer.from([0xff])],
      ['image/png', Buffer.from('no picture')],
    ] as const) {
      await expect(client.setClipboard('desk', type, 'clipboard', bytes)).rejects.toMatchObject({ code: 'VM_INPUT' });
    }
    const large = client.setClipboard('desk', 'text/plain', 'clipboard', Buffer.alloc((4 << 20) + 1, 'x'));
    await expect(large).rejects.toMatchObject({ code: 'SANDBOX_BAD_REQUEST' });
  });

  it('has the network that its policy allows, with the address that it asks for', async () => {
    const { ipv4 } = await client.network('desk');
    const asked = async () => (await run('ip addr show eth0; route -n; cat /etc/resolv.conf')).text;
    for (const until = performance.now() + 10 * MINUTES; !(await asked()).includes(`inet ${ipv4}/16`); ) {
      if (performance.now() > until) throw new Error(`no address: ${await asked()}`);
      await delay(500);
    }
    expect(await reach(80)).toBe('from the net');
    expect(await reach(81)).toBe('');
    const denied = await client.networkDenied('desk', 100);
    expect(denied.some(({ destination, port }) => destination === site && port === 81)).toBe(true);
    await client.setNetwork('desk', { default: 'deny', rules: [{ allow: site, ports: [81] }] } as never);
    expect(await reach(81)).toBe('from the net');
    expect(await reach(80)).toBe('');
  });

  it('says what it lacks', async () => {
    await expect(client.packDiff('desk', { name: 'desk:2' })).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
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
    // Its agent and its network are those of before.
    expect(await reach(81)).toBe('from the net');
    const waiting = desk().exec({ args: ['sh', '-c', 'sleep 3; echo over'] });
    await waiting;
    await client.pause('desk');
    await client.resume('desk');
    expect((await (await waiting).wait()).exitCode).toBe(0);
  });

  it('is forked: another one boots from a copy of its disk, with a network of its own', async () => {
    await answers();
    await run('echo of the parent > /root/kept');
    const forked = await client.fork('desk', {});
    const name = forked.sandboxes[0]!.name;
    try {
      await run('echo later > /root/kept');
      const child = node.get(name);
      const { ipv4 } = await client.network(name);
      expect(ipv4).not.toBe((await client.network('desk')).ipv4);
      for (const until = performance.now() + 10 * MINUTES; ; await delay(500)) {
        const text = await child.files.read('/root/kept').then(String, (thrown: unknown) => thrown);
        if (text === 'of the parent\n') break;
        if (!isUnsupported(text) || performance.now() > until) throw text;
      }
      await expect(client.fork('desk', { snapshot: 'x:1' })).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
      expect(
        fs.readdirSync(join(process.env.DSEC_STATE!, 'sandboxes/desk')).filter((one) => /^fork/.test(one)),
      ).toEqual([]);
    } finally {
      await client.remove(name, true);
    }
  });

  it('is forked with its memory: what runs in it goes on, with an address and random numbers of its own', async () => {
    await answers();
    const draw = 'cat /proc/sys/kernel/random/uuid > /run/new; mv /run/new /run/drawn';
    await run(`echo in memory > /run/kept; (while :; do ${draw}; sleep 1; done) > /dev/null 2>&1 &`);
    const ask = { memory: true, count: 2, requestId: 'with memory' };
    const names = (await client.fork('desk', ask)).sandboxes.map(({ name }) => name);
    try {
      expect((await client.fork('desk', ask)).sandboxes.map(({ name }) => name)).toEqual(names);
      await expect(client.fork('desk', { memory: true, snapshot: 'x:1' })).rejects.toMatchObject({
        code: 'SANDBOX_BAD_REQUEST',
      });
      const drawn = new Set<string>();
      for (const name of ['desk', ...names]) {
        const inside = async (script: string) => (await run(script, undefined, node.get(name))).text;
        const { ipv4 } = await client.network(name);
        for (const until = performance.now() + 10 * MINUTES; !(await inside('ip addr')).includes(`inet ${ipv4}/16`); ) {
          if (performance.now() > until) throw new Error(`${name}: no address: ${await inside('ip addr')}`);
          await delay(500);
        }
        expect(await inside('cat /run/kept')).toBe('in memory\n');
        expect(Math.abs(Number(await inside('date +%s')) - Date.now() / 1000)).toBeLessThan(60);
        for (const one of [await inside('cat /run/drawn'), await inside('cat /proc/sys/kernel/random/uuid')])
          drawn.add(one);
      }
      expect(drawn.size).toBe(6);
      expect(
        fs.readdirSync(join(process.env.DSEC_STATE!, 'sandboxes/desk')).filter((one) => /^moment/.test(one)),
      ).toEqual([]);
    } finally {
      for (const name of names) await client.remove(name, true);
    }
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
