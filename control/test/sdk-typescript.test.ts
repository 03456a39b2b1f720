/** libdsec in TypeScript where the scenarios do not reach: what is given up, services that die, memory, contexts, the package itself. */
import { execFile, execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { onlyNew } from '../sdk/typescript/src/command.ts';
import { Collector } from '../sdk/typescript/src/command-result.ts';
import { findEndpoint } from '../sdk/typescript/src/context.ts';
import { errorFrom } from '../sdk/typescript/src/errors.ts';
import * as libdsec from '../sdk/typescript/src/index.ts';
import { createBody } from '../sdk/typescript/src/run-args.ts';
import { canRun, IMAGE, makeWorld, root, type World } from './sdk/world.ts';

const { DSecClient, DSecTimeoutError, ERROR_TABLE, SandboxGone } = libdsec;
const run = promisify(execFile);
const source = join(root, 'control/sdk/typescript');

describe('the errors of libdsec', () => {
  const rows = JSON.parse(fs.readFileSync(join(root, 'control/sdk/errors.json'), 'utf8')) as {
    class: string;
    codes: string[];
    statuses: number[];
  }[];

  it('are those of the table that both libraries share', () => {
    const made = ERROR_TABLE.map(([kind, codes, statuses]) => ({ class: kind.name, codes, statuses }));
    const shared = rows.map(({ class: name, codes, statuses }) => ({ class: name, codes, statuses }));
    expect(shared.slice(0, made.length)).toEqual(made);
    for (const { class: name } of rows) expect(name in libdsec, name).toBe(true);
  });

  it('say why a sandbox is gone, and which backend there is not', () => {
    const gone = errorFrom({
      code: 'SANDBOX_GONE',
      message: 'sandbox a.b is gone: expired: its time was over',
      status: 410,
    });
    expect(gone).toMatchObject({ name: 'SandboxGone', reason: 'expired' });
    // As the answer says it; by an apiserver that does not, as the runtime words it of containers.
    const said = {
      code: 'SANDBOX_GONE',
      message: 'sandbox a.b is gone: its guest broke the protocol',
      reason: 'failed',
    };
    expect(errorFrom(said)).toMatchObject({ reason: 'failed' });
    const files = ['node/agent-sandbox.ts', 'node/resident-sandbox.ts'];
    const source = files.map((file) => fs.readFileSync(join(root, 'runtime', file), 'utf8')).join('\n');
    const ends = [...source.matchAll(/endNow\('([a-z-]+)', ['`]([^'`]+)['`]\)/g)];
    expect(ends.length).toBeGreaterThan(6);
    for (const [, reason, detail] of ends) {
      expect(errorFrom({ code: 'SANDBOX_GONE', message: `sandbox a.b is gone: ${detail}` }), detail).toMatchObject({
        reason,
      });
    }
    const never = errorFrom({ code: 'SANDBOX_GONE', message: 'sandbox a.b is gone: its edge has none', status: 410 });
    expect((never as InstanceType<typeof SandboxGone>).reason).toBe(undefined);
    const other = errorFrom({
      code: 'RUNTIME_UNSUPPORTED',
      message: 'backend vm cannot do this: it has no pause',
      status: 501,
    });
    expect(other).toMatchObject({ name: 'UnsupportedError', backend: 'vm' });
  });
});

describe('what libdsec makes of arguments and answers', () => {
  it('makes a request of run arguments', () => {
    const args = {
      containerImage: 'sphinx:official',
      memoryLimitMb: 4096,
      cpuCoresLimit: 4,
      ttlRunningStop: 300,
      networkRules: { npm: false, pypi: true, '*.debian.org': true, '10.0.0.0/8': false },
      initUser: 'root',
      env: { A: '1' },
    };
    expect(JSON.parse(JSON.stringify(createBody('container', args, 'r')))).toEqual({
      image: 'sphinx:official',
      requestId: 'r',
      env: ['A=1'],
      user: 'root',
      idleMs: 300_000,
      cpus: 4,
      memoryBytes: 4096 * 2 ** 20,
      network: {
        mode: 'policy',
        policy: {
          default: 'deny',
          rules: [{ allow: '*.debian.org' }, { deny: '10.0.0.0/8' }],
          services: { npm: false, pypi: true },
        },
      },
    });
    expect(() => createBody('container', { ...args, networkPolicy: {} }, 'r')).toThrow(libdsec.InvalidRequest);
  });

  it('keeps the ends of output, and counts the rest', () => {
    const kept = new Collector(8);
    for (const text of ['abc', 'defghi', 'jk', 'lmnopqrst']) kept.add(Buffer.from(text));
    expect(kept.collected).toEqual({ bytes: Buffer.from('abcdqrst'), missingBytes: 12 });
    const gap = new Collector(8);
    gap.add(Buffer.from('ab'));
    gap.skip(100);
    gap.add(Buffer.from('cd'));
    expect(gap.collected).toEqual({ bytes: Buffer.from('abcd'), missingBytes: 100 });
  });

  it('takes of output that comes again what is new', () => {
    const at = { stdout: 5, stderr: 0 };
    const part = (offset: number, text: string) => [
      ...onlyNew({ stream: 'stdout', offset, bytes: Buffer.from(text) }, at),
    ];
    expect(part(0, 'abc')).toEqual([]);
    expect(part(3, 'defg')).toEqual([{ stream: 'stdout', offset: 5, bytes: Buffer.from('fg') }]);
    expect(part(9, 'j')).toEqual([
      { stream: 'stdout', offset: 7, missingBytes: 2 },
      { stream: 'stdout', offset: 9, bytes: Buffer.from('j') },
    ]);
    expect([...onlyNew({ stream: 'stdout', offset: 8, missingBytes: 4 }, at)]).toEqual([
      { stream: 'stdout', offset: 10, missingBytes: 2 },
    ]);
  });
});

describe('where libdsec finds the API', () => {
  const saved = { ...process.env };
  let folder: string;

  beforeEach(() => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-context-'));
    process.env.XDG_CONFIG_HOME = folder;
    for (const name of ['DSEC_API', 'DSEC_TOKEN']) delete process.env[name];
    fs.mkdirSync(join(folder, 'dsec'));
    fs.writeFileSync(join(folder, 'dsec/token'), 'of-the-file\n');
    const contexts = {
      here: { url: 'http://127.0.0.1:7300/', tokenFile: 'token' },
      there: { url: 'https://dsec.example', token: 'of-there' },
    };
    fs.writeFileSync(join(folder, 'dsec/contexts.json'), JSON.stringify({ current: 'here', contexts }));
  });
  afterEach(() => {
    process.env = { ...saved };
    fs.rmSync(folder, { recursive: true, force: true });
  });

  it('takes the current context, another one, the environment, what it is given', () => {
    expect(findEndpoint()).toMatchObject({ url: 'http://127.0.0.1:7300', token: 'of-the-file' });
    expect(findEndpoint({ context: 'there' })).toMatchObject({ url: 'https://dsec.example', token: 'of-there' });
    process.env.DSEC_TOKEN = 'of-the-environment';
    expect(findEndpoint()).toMatchObject({ url: 'http://127.0.0.1:7300', token: 'of-the-environment' });
    process.env.DSEC_API = 'http://elsewhere:1';
    expect(findEndpoint()).toMatchObject({ url: 'http://elsewhere:1', token: 'of-the-environment' });
    expect(findEndpoint({ url: 'http://given:2/x/', token: 't' })).toMatchObject({
      url: 'http://given:2/x',
      token: 't',
    });
    expect(findEndpoint({ context: 'there' })).toMatchObject({ token: 'of-there' });
  });

  it('gives the token of a context to no other URL', () => {
    expect(findEndpoint({ url: 'http://elsewhere:1' }).token).toBe(undefined);
    expect(findEndpoint({ url: 'http://127.0.0.1:7300' }).token).toBe('of-the-file');
  });

  it('says what is missing', () => {
    expect(() => findEndpoint({ context: 'nowhere' })).toThrow(/no context nowhere/);
    expect(() => findEndpoint({ url: 'nonsense', token: 't' })).toThrow(/no URL/);
    expect(() => findEndpoint({ url: 'ftp://x', token: 't' })).toThrow(libdsec.ConfigurationError);
    fs.writeFileSync(join(folder, 'dsec/contexts.json'), '{');
    expect(() => findEndpoint()).toThrow(/is no JSON/);
    fs.rmSync(join(folder, 'dsec'), { recursive: true });
    expect(() => findEndpoint()).toThrow(/no API to talk to/);
  });
});

describe('the package', () => {
  it('builds, and imports nothing but Node', () => {
    execFileSync(join(root, 'node_modules/.bin/tsc'), ['-p', source]);
    for (const name of fs.readdirSync(join(source, 'dist'))) {
      const text = fs.readFileSync(join(source, 'dist', name), 'utf8');
      for (const [, from] of text.matchAll(/^(?:import|export)\b[^;]*?\bfrom '([^']+)'/gm)) {
        expect(from, name).toMatch(/^(node:|\.\/[a-z-]+\.(js|ts)$)/);
      }
    }
    const { exports } = JSON.parse(fs.readFileSync(join(source, 'package.json'), 'utf8')) as {
      exports: Record<string, object>;
    };
    for (const file of Object.values(exports['.']!)) expect(fs.existsSync(join(source, String(file)))).toBe(true);
  });
});

describe.skipIf(!canRun)('libdsec, TypeScript, against a service that has its troubles', { timeout: 180_000 }, () => {
  let world: World;
  let client: InstanceType<typeof DSecClient>;
  let sandbox: libdsec.Sandbox;

  beforeAll(async () => {
    world = await makeWorld();
    client = new DSecClient({ url: world.url, token: world.token });
    sandbox = await client.runContainer({ containerImage: IMAGE });
  }, 400_000);
  afterAll(async () => {
    client?.close();
    await world?.close();
  }, 400_000);
  afterEach(() => {
    world.front.faults.length = 0;
  });

  const running = async () => (await sandbox.commands()).filter((command) => command.running).length;

  it('loses nothing and doubles nothing when the service is killed in the middle of a stream', async () => {
    const script =
      'i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); [ $((i%30)) = 0 ] && sleep 0.05; done; exit 4';
    const command = await sandbox.exec(['sh', '-c', script]);
    let seen = '';
    let killing: Promise<void> | undefined;
    for await (const bytes of command.bytes('stdout')) {
      seen += bytes;
      if (killing === undefined && seen.length > 2000) killing = world.restart();
    }
    await killing;
    expect(seen).toBe(Array.from({ length: 3000 }, (_, at) => `line ${at}\n`).join(''));
    expect(command.result).toMatchObject({ exitCode: 4 });
  });

  it('leaves no command running when it is given up', async () => {
    const stop = new AbortController();
    const working = sandbox.runShell('echo begun; sleep 1000 & sleep 1000', {
      signal: stop.signal,
      onOutput: () => stop.abort(new Error('enough')),
    });
    await expect(working).rejects.toThrow('enough');
    expect(await running()).toBe(0);
  });

  it('leaves no command running when it is given up while it is being started', async () => {
    world.front.fault({ match: 'POST .*/commands$', times: 1, delayMs: 1500 });
    await expect(sandbox.runShell('sleep 1000', { signal: AbortSignal.timeout(300) })).rejects.toThrow();
    expect(await running()).toBe(0);
    world.front.fault({ match: 'POST .*/commands$', times: 1, delayMs: 1500 });
    await expect(sandbox.exec(['sleep', '1000'], { timeoutMs: 300 })).rejects.toThrow(DSecTimeoutError);
    expect(await running()).toBe(0);
  });

  it('leaves no sandbox behind when it is given up while it is being made', async () => {
    const before = (await client.listSandboxes()).sandboxes.length;
    world.front.fault({ match: 'POST /v1/sandboxes$', times: 1, delayMs: 2000 });
    const making = client.runContainer({ containerImage: IMAGE }, { timeoutMs: 500 });
    await expect(making).rejects.toThrow(DSecTimeoutError);
    expect((await client.listSandboxes()).sandboxes.length).toBe(before);
  });

  it('waits without ending what it waits for', async () => {
    await using command = await sandbox.exec(['sleep', '1000']);
    await expect(command.wait({ timeoutMs: 200 })).rejects.toThrow(DSecTimeoutError);
    await expect(command.wait({ signal: AbortSignal.timeout(200) })).rejects.toThrow(/abort|timeout/i);
    expect((await command.view()).running).toBe(true);
  });

  it('ends a command where its scope ends', async () => {
    {
      await using command = await sandbox.exec(['sleep', '1000']);
      expect(command.result).toBe(undefined);
    }
    await expect.poll(running, { timeout: 30_000 }).toBe(0);
  });

  it('gives commands a time-out of its own only where none is given and they are not in the background', async () => {
    await using impatient = new DSecClient({ url: world.url, token: world.token, commandTimeoutMs: 700 });
    const same = impatient.attach(sandbox.id);
    expect(await same.runShell('sleep 1000')).toMatchObject({ timedOut: true });
    await using background = await same.exec(['sleep', '1000'], { background: true });
    expect(await same.runShell('sleep 1', { timeoutMs: 60_000 })).toMatchObject({ exitCode: 0 });
    expect((await background.view()).running).toBe(true);
  });

  it('calls a sandbox that ends under a command gone, and no failed command', async () => {
    const other = await client.runContainer({ containerImage: IMAGE });
    const working = other.runShell('echo begun; sleep 1000', {
      check: true,
      onOutput: () => void other.stop({ keep: true, graceMs: 0 }).catch(() => {}),
    });
    const error = await working.then(undefined, (thrown: unknown) => thrown);
    expect(error).toBeInstanceOf(SandboxGone);
    expect(error).toMatchObject({ reason: 'stopped' });
    await other.remove({ force: true });
    await expect(other.runShell('true')).rejects.toThrow(SandboxGone);
  });

  it('holds up a writer whose command does not read, until it is given up', async () => {
    await using command = await sandbox.exec(['sleep', '1000'], { stdin: true });
    const writing = command.write(Buffer.alloc(4 << 20), { signal: AbortSignal.timeout(1500) });
    await expect(writing).rejects.toThrow(/abort|timeout/i);
  });

  it('streams a hundred megabytes without growing', async () => {
    const script = `
      import { DSecClient } from ${JSON.stringify(join(source, 'dist/index.js'))};
      const client = new DSecClient();
      const sandbox = client.attach(process.argv[1]);
      const command = await sandbox.exec(['head', '-c', '104857600', '/dev/zero']);
      let count = 0, before = 0;
      for await (const { bytes, missingBytes } of command.output()) {
        count += bytes?.length ?? -missingBytes;
        if (count > 8 << 20 && before === 0) before = process.resourceUsage().maxRSS;
      }
      const { stdout, stdoutMissingBytes, exitCode } = await sandbox.run(['head', '-c', '20971520', '/dev/zero'], { outputLimitBytes: 1 << 20 });
      const grown = process.resourceUsage().maxRSS - before;
      console.log(JSON.stringify({ count, kept: stdout.length, stdoutMissingBytes, exitCode, grown }));
      client.close();
    `;
    const { stdout } = await run(process.execPath, ['--input-type=module', '-e', script, sandbox.id], {
      env: world.env,
    });
    const { grown, ...told } = JSON.parse(stdout) as { grown: number };
    expect(told).toEqual({ count: 100 << 20, kept: 1 << 20, stdoutMissingBytes: 19 << 20, exitCode: 0 });
    expect(grown).toBeLessThan(80_000);
  });

  it('asks again for what is left of a batch that breaks off', async () => {
    world.front.fault({ match: 'POST /v1/sandboxes/batch$', times: 2, cutAfter: 600 });
    const args = [{ containerImage: IMAGE }, { containerImage: 'nowhere:1' }, { containerImage: IMAGE }];
    const told: (string | undefined)[] = [];
    for await (const { index, sandbox: made, error } of client.runContainers(args)) {
      told[index] = error?.constructor.name ?? 'made';
      await made?.remove({ force: true });
    }
    expect(told).toEqual(['made', 'NotFound', 'made']);
  });
});
