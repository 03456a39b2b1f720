/** What the command line says to somebody who is new: where the way goes on, not only where it ends. Services are made up. */
import * as fs from 'node:fs';
import { createServer, type Server } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Command } from 'commander';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { commandTable } from '../cli/command-table.ts';
import { runsWordsAfter, separated } from '../cli/command-words.ts';
import { limitNames } from '../cli/limit-options.ts';
import { BackendsHere } from '../edge/backends-here.ts';
import { backendView } from '../runtime-service/backend-view.ts';
import { runCommand } from './command-run.ts';

const saved = { ...process.env };
let folder: string;
let server: Server | undefined;

beforeEach(() => {
  folder = fs.mkdtempSync(join(tmpdir(), 'dsec-guidance-'));
  for (const name of ['RUN', 'STATE', 'STORE', 'CACHE']) process.env[`DSEC_${name}`] = join(folder, name.toLowerCase());
  process.env.XDG_CONFIG_HOME = join(folder, 'config');
  delete process.env.DSEC_API;
});
afterEach(async () => {
  server?.closeAllConnections();
  await new Promise((done) => (server === undefined ? done(undefined) : server.close(done)));
  server = undefined;
  process.env = { ...saved };
  fs.rmSync(folder, { recursive: true, force: true });
});

/** An API that has these sandboxes, `ID!` one that has ended, and notes what it is asked; `?EDGE` does not answer. */
async function cluster(...told: string[]): Promise<{ url: string; asked: string[] }> {
  const unreachable = told.filter((one) => one.startsWith('?')).map((one) => one.slice(1));
  const ids = told.filter((one) => !one.startsWith('?')).map((one) => one.replace('!', ''));
  const asked: string[] = [];
  server = createServer((request, answer) => {
    const { method, url = '' } = request;
    asked.push(`${method} ${url}`);
    const isEnded = /[?&]state=ended/.test(url);
    const sandboxes = ids
      .filter((id) => told.includes(`${id}!`) === isEnded)
      .map((id) => ({ name: id.split('.')[0], id, state: isEnded ? 'ended' : 'running' }));
    const gone = method === 'DELETE' && !ids.some((id) => url.includes(`/${id}?`));
    const isList = /^\/v1\/sandboxes(\?|$)/.test(url);
    const body = isList ? { sandboxes, unreachable } : { detail: 'stopped', reason: 'stopped' };
    const error = { code: 'SANDBOX_ID', message: `${url}: no id`, exit: 4 };
    answer.writeHead(gone ? 404 : 200, { 'content-type': 'application/json' });
    answer.end(JSON.stringify(gone ? { error } : body));
  });
  await new Promise<void>((done) => server!.listen(0, '127.0.0.1', done));
  return { url: `http://127.0.0.1:${(server.address() as { port: number }).port}`, asked };
}

describe('a group without a command', () => {
  it.each(['sandbox', 'disk', 'context', 'quota'])('%s prints its help', async (name) => {
    expect(commandTable.some((entry) => entry.name === name)).toBe(true);
    const { text, exitCode } = await runCommand(name);
    expect([text, exitCode]).toEqual([(await runCommand(name, '--help')).text, 0]);
  });
});

describe('the words of a command that is run', () => {
  const command = runsWordsAfter(1, new Command('exec'))
    .option('-t, --tty')
    .option('-u, --user <user>')
    .option('--timeout <time>')
    .option('-n, --no-stdin');

  it.each([
    ['box ls -la', 'box -- ls -la'],
    ['-tn box ls -t', '-tn box -- ls -t'],
    ['-tu root box --timeout 3s id -u', '-tu root box --timeout 3s -- id -u'],
    ['-uroot box --timeout=3s id', '-uroot box --timeout=3s -- id'],
    ['box -- ls -la', 'box -- ls -la'],
    ['box', 'box'],
    ['--unknown box ls', '--unknown box ls'],
  ])('%s', (given, read) => {
    expect(separated(command, given.split(' ')).join(' ')).toBe(read);
  });

  it('are no business of other commands', () => {
    expect(separated(new Command('ls'), ['image', 'path', '-x'])).toEqual(['image', 'path', '-x']);
  });
});

describe('a context that is current', () => {
  it('is named where nobody answers there, with the way back', async () => {
    await runCommand('context', 'set', 'local-cluster', '--url', 'http://127.0.0.1:1', '--use');
    const way = /context local-cluster is current.*--api local.*dsec context use local/;
    await expect(runCommand('sandbox', 'ls')).rejects.toMatchObject({ exit: 6, hint: expect.stringMatching(way) });
    await expect(runCommand('sandbox', 'ls', '--api', 'http://127.0.0.1:1')).rejects.toMatchObject({
      hint: expect.not.stringContaining('is current'),
    });
    await expect(runCommand('pack-diff', 'a.vm', '--name', 'w:1')).rejects.toMatchObject({
      code: 'SANDBOX_ELSEWHERE',
      hint: expect.stringContaining('dsec sandbox pack-diff a.vm'),
    });
  });

  it('has no say in what is on this machine alone when it cannot be read', async () => {
    fs.mkdirSync(join(folder, 'config/dsec'), { recursive: true });
    fs.writeFileSync(join(folder, 'config/dsec/contexts.json'), 'no JSON');
    await expect(runCommand('sandbox', 'ls')).rejects.toMatchObject({ code: 'CONTEXT_FILE' });
    await expect(runCommand('pack-diff', 'a', '--name', 'w:1')).rejects.toMatchObject({
      code: 'RUNTIME_SANDBOX_NOT_FOUND',
    });
  });

  it('is this machine where none is', async () => {
    await runCommand('context', 'set', 'team', '--url', 'http://127.0.0.1:1', '--use');
    expect((await runCommand('context', 'ls')).text).toMatch(/^\* +team .*\n +local +this machine$/m);
    await runCommand('context', 'use', 'local');
    expect((await runCommand('context', 'ls')).text).toMatch(/^\* +local +this machine$/m);
  });
});

describe('sandboxes of a cluster', () => {
  it('are found by a name that one alone has', async () => {
    const { url, asked } = await cluster('work.one', 'twice.one', 'twice.two');
    expect((await runCommand('sandbox', 'rm', 'work', '--api', url)).text).toBe('work.one: removed\n');
    expect(asked).toEqual([
      'GET /v1/sandboxes?name=work',
      'GET /v1/sandboxes?name=work&state=ended',
      'DELETE /v1/sandboxes/work.one?force=false',
    ]);
    await expect(runCommand('sandbox', 'rm', 'twice', '--api', url)).rejects.toMatchObject({
      code: 'SANDBOX_AMBIGUOUS',
      message: expect.stringContaining('twice.one, twice.two'),
    });
    await expect(runCommand('sandbox', 'rm', 'none', '--api', url)).rejects.toMatchObject({ code: 'SANDBOX_ID' });
  });

  it('are not taken for others that are on edges which do not answer', async () => {
    const { url, asked } = await cluster('work.one', '?two');
    for (const args of [
      ['rm', '-f', 'work'],
      ['stop', 'work'],
      ['pause', 'work'],
      ['logs', 'work'],
    ]) {
      await expect(runCommand('sandbox', ...args, '--api', url)).rejects.toMatchObject({
        code: 'SANDBOX_NAME_UNSURE',
        exit: 6,
        message: expect.stringContaining('no answer from edge two'),
      });
    }
    expect(asked.filter((one) => !one.startsWith('GET /v1/sandboxes?'))).toEqual([]);
    // Who names the edge means one alone.
    const { text } = await runCommand('sandbox', 'rm', '-f', 'work.one', '--api', url, '--json');
    expect(JSON.parse(text)).toEqual({ removed: ['work.one'] });
  });

  it('are found when they have ended, to be removed or stopped once more', async () => {
    const { url } = await cluster('work.one!', 'twice.one', 'twice.two!');
    const { text } = await runCommand('sandbox', 'stop', 'work', '--api', url);
    expect(text).toBe('work.one: stopped; dsec sandbox rm work.one removes what it changed\n');
    expect((await runCommand('sandbox', 'rm', 'work', '--api', url)).text).toBe('work.one: removed\n');
    expect((await runCommand('sandbox', 'stop', 'twice', '--api', url)).text).toContain('twice.one: stopped');
    await expect(runCommand('sandbox', 'rm', '-f', 'twice', '--api', url)).rejects.toMatchObject({
      code: 'SANDBOX_AMBIGUOUS',
      message: expect.stringContaining('twice.one, twice.two'),
    });
    await expect(runCommand('sandbox', 'pause', 'work', '--api', url)).resolves.toMatchObject({
      text: expect.stringContaining('work: '),
    });
  });

  it('are removed though others of the same command cannot be', async () => {
    const { url } = await cluster('b.one', 'c.one');
    const { text, stderr, exitCode } = await runCommand('sandbox', 'rm', 'gone.one', 'b.one', 'c.one', '--api', url);
    expect([text, exitCode]).toEqual(['b.one: removed\nc.one: removed\n', 4]);
    expect(stderr).toContain('gone.one');
  });

  it('are copied to from paths of this machine that are there', async () => {
    for (const path of [join(folder, 'src'), '-']) {
      await expect(runCommand('sandbox', 'cp', path, 'box:/work')).rejects.toMatchObject({
        code: 'SANDBOX_COPY_NONE',
        exit: 4,
        message: expect.stringContaining('no such file or folder on this machine'),
      });
    }
  });
});

describe('what is there', () => {
  it('tells a store that is not there from an empty one', async () => {
    const { stderr, exitCode } = await runCommand('images', '--store', join(folder, 'typo'));
    expect([stderr, exitCode]).toEqual([
      `there is no store at file://${join(folder, 'typo')} yet; \`dsec convert\` makes one\n`,
      0,
    ]);
  });

  it('knows disks by their names', async () => {
    await runCommand('disk', 'create', 'work', '--size', '1MiB');
    await expect(runCommand('disk', 'serve', 'work', '--nbd', 'unix:/x')).rejects.toMatchObject({
      code: 'CLI_DISK_PREFIX',
      hint: expect.stringContaining('disk:work'),
    });
    await expect(runCommand('disk', 'rm', 'gone')).rejects.toMatchObject({
      message: expect.stringContaining('there is no disk gone'),
      hint: expect.stringContaining('dsec disk ls'),
    });
  });

  it('says what a sandbox lives in by one word', () => {
    expect(backendView({ backend: 'dsec' })).toEqual({ backend: 'container', runtime: 'dsec' });
    expect(backendView({ backend: 'crun' })).toEqual({ backend: 'container', runtime: 'crun' });
    expect(backendView({ backend: 'vm' })).toEqual({ backend: 'vm' });
  });

  it('shows limits as people write them', () => {
    expect(limitNames({ memoryBytes: 2 ** 31, cpus: 1.5, pids: 100 })).toBe('--cpus 1.5 --memory 2.00 GiB --pids 100');
  });
});

it('an edge has what was installed after its start', () => {
  const here = new Set(['container']);
  let now = 0;
  const backends = new BackendsHere({
    stateDir: folder,
    sandboxes: 7,
    now: () => now,
    isHere: (backend) => here.has(backend),
  });
  expect([...backends.limits]).toEqual([['container', 7]]);
  here.add('microvm');
  expect([...backends.limits.keys()]).toEqual(['container']);
  now = 6000;
  here.delete('container');
  expect([...backends.limits.keys()]).toEqual(['container', 'microvm']);
});
