/** `dsec serve ublkd` in a folder of its own, with what tests ask of it: called in a `describe`, it ends all it has started after each test. */
import { type ChildProcess, spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, mkdirSync, readdirSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, afterEach, beforeAll, expect } from 'vitest';

export const PROGRAM = fileURLToPath(new URL('../../bin/dsec', import.meta.url));
export const WAIT_MS = 60_000;

/** A load ends by itself when its service is killed. */
function killGroup({ pid }: ChildProcess): void {
  try {
    process.kill(-pid!, 'SIGKILL');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ESRCH') throw error;
  }
}

export interface Ended {
  readonly status: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

export function blockService() {
  const root = join(realpathSync(tmpdir()), `dsec-bd-${randomUUID()}`);
  const env = { ...process.env, DSEC_STATE: join(root, 'state'), DSEC_RUN: join(root, 'run') };
  const children = new Set<ChildProcess>();

  beforeAll(() => void mkdirSync(root));
  afterEach(async () => {
    for (const child of children) {
      const ended = once(child, 'close');
      // A load has a process group.
      if (child.spawnfile === 'sh') killGroup(child);
      else child.kill('SIGKILL');
      await ended;
    }
    // One that a command started, of a test that failed.
    const pid = servicePid();
    if (pid !== undefined) {
      process.kill(pid, 'SIGKILL');
      await until('the end of the service', () => !existsSync(`/proc/${pid}`));
    }
    rmSync(join(root, 'state'), { recursive: true, force: true });
    rmSync(join(root, 'run'), { recursive: true, force: true });
  });
  afterAll(() => rmSync(root, { recursive: true, force: true }));

  function start(command: string, args: readonly string[], more: NodeJS.ProcessEnv = {}, detached = false) {
    const stdio = ['ignore', 'pipe', 'pipe'] satisfies ['ignore', 'pipe', 'pipe'];
    const child = spawn(command, args, { env: { ...env, ...more }, stdio, cwd: root, detached });
    children.add(child);
    let [stdout, stderr] = ['', ''];
    child.stdout.setEncoding('utf8').on('data', (text: string) => {
      stdout += text;
    });
    child.stderr.setEncoding('utf8').on('data', (text: string) => {
      stderr += text;
    });
    const ended = new Promise<Ended>((done) => {
      child.once('close', (status) => {
        children.delete(child);
        done({ status, stdout, stderr });
      });
    });
    return { child, ended, said: () => stdout, complained: () => stderr };
  }

  const run = (...args: string[]) => start(process.execPath, [PROGRAM, ...args]).ended;

  async function dsec(...args: string[]): Promise<string> {
    const { status, stdout, stderr } = await run(...args);
    expect([args, status, stderr]).toEqual([args, 0, '']);
    return stdout;
  }

  const json = async (...args: string[]) => JSON.parse(await dsec(...args, '--json'));

  async function refused(code: string, exit: number, ...args: string[]): Promise<string> {
    const { status, stderr } = await run(...args, '--json');
    const { error } = JSON.parse(stderr);
    expect([args, error.code, status]).toEqual([args, code, exit]);
    return error.message;
  }

  async function until<T>(what: string, find: () => T | undefined | false): Promise<T> {
    for (const late = Date.now() + WAIT_MS; ; await delay(10)) {
      const found = find();
      if (found) return found;
      if (Date.now() > late) throw new Error(`waited in vain: ${what}`);
    }
  }

  async function serve(...args: string[]) {
    const service = start(process.execPath, [PROGRAM, 'serve', 'ublkd', ...args]);
    let over = false;
    service.ended.then(() => {
      over = true;
    });
    await until('the service', () => over || service.said().includes('block service at'));
    if (over) throw new Error((await service.ended).stderr);
    return service;
  }

  async function end(service: { child: ChildProcess; ended: Promise<Ended> }, signal: NodeJS.Signals = 'SIGTERM') {
    service.child.kill(signal);
    return service.ended;
  }

  async function qemuIo(uri: string, ...commands: string[]): Promise<string> {
    const access = commands.some((command) => command.startsWith('write')) ? [] : ['-r'];
    const args = ['-f', 'raw', ...access, ...commands.flatMap((command) => ['-c', command]), uri];
    const { status, stdout, stderr } = await start('qemu-io', args).ended;
    expect([status, stderr]).toEqual([0, '']);
    // It ends with 0 whatever a pattern says.
    expect(stdout).not.toMatch(/verification failed|error/i);
    return stdout;
  }

  function ask(path: string, method = 'GET', body?: object): Promise<{ status: number; text: string }> {
    return new Promise((done, failed) => {
      const headers = body === undefined ? {} : { 'content-type': 'application/json' };
      const asked = request({ socketPath: join(root, 'run/ublkd.sock'), path, method, headers }, async (answer) => {
        let text = '';
        for await (const piece of answer.setEncoding('utf8')) text += piece;
        done({ status: answer.statusCode!, text });
      });
      asked.once('error', failed);
      asked.end(body === undefined ? undefined : JSON.stringify(body));
    });
  }

  /** Writes zeros in 64 places from `offset` on, again and again, until it is ended. */
  function load(at: string, offset: number) {
    const bench = `qemu-img bench -f raw -w -c 512 -s 4096 -o ${offset} -S 65536 -t none "$0" >&2`;
    const { child, ended } = start('sh', ['-c', `while ${bench}; do :; done`, at], {}, true);
    return async () => {
      killGroup(child);
      await ended;
    };
  }

  async function writesOf(name: string): Promise<number> {
    return JSON.parse((await ask(`/v1/disks/${name}`)).text).operations.write.count;
  }

  function nothingLeft(): void {
    expect(readdirSync(join(root, 'run')).filter((name) => name.endsWith('.sock') || name === 'ublkd')).toEqual([]);
  }

  function servicePid(): number | undefined {
    const found = readdirSync('/proc').find((name) => {
      if (!/^\d+$/.test(name)) return false;
      try {
        return (
          readFileSync(`/proc/${name}/cmdline`, 'latin1').includes('\0ublkd\0') &&
          readFileSync(`/proc/${name}/environ`, 'latin1').includes(`DSEC_RUN=${root}/run`)
        );
      } catch {
        return false;
      }
    });
    return found === undefined ? undefined : Number(found);
  }

  function writeRaw(name: string): string {
    writeFileSync(join(root, name), '');
    return name;
  }

  return {
    root,
    start,
    run,
    dsec,
    json,
    refused,
    until,
    serve,
    end,
    qemuIo,
    ask,
    load,
    writesOf,
    nothingLeft,
    servicePid,
    writeRaw,
  };
}
