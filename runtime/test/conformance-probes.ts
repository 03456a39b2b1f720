/**
 * What each capability of the table (sandbox-api/backend-table.ts) is when it is asked for: the same calls on every backend. What a backend has must
 * give what is said here; what it lacks must be refused by the call itself, with RUNTIME_UNSUPPORTED that names backend and capability.
 */
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { expect } from 'vitest';
import { commandResult, commandTask, type TaskCommand } from '../fncall/command-task.ts';
import type { Pool } from '../fncall/pool.ts';
import { type FnCallNode, FullVmSandbox } from '../index.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import type { Backend } from '../sandbox-api/backend-table.ts';
import { type Capability, isUnsupported, unsupported } from '../sandbox-api/capabilities.ts';
import type { ExecHandle, ExecSpec } from '../sandbox-api/exec.ts';

export interface Subject {
  readonly backend: Backend;
  /** As `node.create` with the backend's name and its image. */
  create(options: Partial<CreateOptions>): Promise<NodeSandbox>;
  /** One that is there all the time; of fncall there is none, and asking says so. */
  sandbox(): Promise<NodeSandbox>;
  /** A command, whatever way the backend has for it. */
  run(
    spec: TaskCommand,
  ): Promise<{ exitCode: number; stdout: Buffer; stderr: Buffer; files: Readonly<Record<string, string>> }>;
}

/** Of a creation. Each by itself; a sandbox that has it all is `sandbox()`. */
export function wishes(toolkit: CreateOptions['base']): Partial<Record<Capability, Partial<CreateOptions>>> {
  return {
    composition: { toolkits: [toolkit] },
    environment: { env: ['GIVEN=1'], workdir: '/tmp' },
    classes: { class: 'be' },
    'cpu-limit': { cpus: 1 },
    'memory-limit': { memoryBytes: 192 << 20 },
    'pids-limit': { pids: 200 },
    'io-limit': { ioReadBps: 1 << 30 },
    'disk-limit': { diskBytes: 256 << 20 },
    'network-policy': { network: { mode: 'policy' } },
    'host-network': { network: { mode: 'host' } },
  };
}

type Probe = (subject: Subject) => Promise<unknown>;

const text = async ({ run }: Subject, script: string, more: Partial<TaskCommand> = {}) => {
  const { stdout } = await run({ args: ['sh', '-c', script], ...more });
  return String(stdout);
};

/** Capabilities that are a call of a sandbox, or of the backend. */
export const PROBES: Partial<Record<Capability, Probe>> = {
  async resident(subject) {
    expect(['running', 'paused']).toContain((await subject.sandbox()).state);
  },
  async exec(subject) {
    const { exitCode, stdout, stderr } = await subject.run({
      args: ['sh', '-c', 'cat; echo err >&2; exit 7'],
      stdin: Buffer.from('input'),
    });
    expect({ exitCode, stdout: String(stdout), stderr: String(stderr) }).toEqual({
      exitCode: 7,
      stdout: 'input',
      stderr: 'err\n',
    });
    await expect(subject.run({ args: ['no-such-program'] })).rejects.toMatchObject({
      code: 'RUNTIME_COMMAND_NOT_FOUND',
    });
  },
  async environment(subject) {
    expect(await text(subject, 'echo $GIVEN $MINE', { env: ['MINE=2'] })).toMatch(/^1? ?2\n$/);
  },
  async composition(subject) {
    expect(await text(subject, 'cat /toolkit/here')).toBe('of the toolkit\n');
  },
  async files(subject) {
    if (subject.backend === 'fncall') {
      const files = [{ path: 'in', content: Buffer.from('brought') }];
      const task = { args: ['sh', '-c', 'cat in in > out'], files, fetch: ['out'] };
      expect((await subject.run(task)).files).toEqual({ out: 'broughtbrought' });
      return;
    }
    const { files } = await subject.sandbox();
    await files.write('/tmp/in', Buffer.from('brought'));
    expect(String(await files.read('/tmp/in'))).toBe('brought');
    await expect(files.read('/tmp/none')).rejects.toMatchObject({ code: 'RUNTIME_FILE' });
  },
  async terminal(subject) {
    const sandbox = await subject.sandbox();
    const command = await sandbox.exec({ args: ['sh', '-c', 'test -t 0'], terminal: { rows: 10, columns: 20 } });
    expect((await command.wait()).exitCode).toBe(0);
  },
  async sessions(subject) {
    const session = await (await subject.sandbox()).openShell();
    await session.run('cd /tmp; N=5');
    expect(String((await session.run('echo $N $PWD')).stdout)).toBe('5 /tmp\n');
    await session.close();
  },
  async watch(subject) {
    const sandbox = await subject.sandbox();
    const watch = await sandbox.watch('/tmp');
    const events = watch[Symbol.asyncIterator]();
    await sandbox.files.write('/tmp/seen', Buffer.from('x'));
    expect((await events.next()).value).toMatchObject({ path: Buffer.from('seen') });
    watch.close();
  },
  async ports(subject) {
    // Nobody listens: the call is there, and says so.
    const sandbox = await subject.sandbox();
    const error = await sandbox.connect(9).catch((thrown: unknown) => thrown);
    if (isUnsupported(error)) throw error;
    expect(error).toMatchObject({ code: 'RUNTIME_PORT_CLOSED' });
  },
  async pause(subject) {
    const sandbox = await subject.sandbox();
    await sandbox.pause();
    expect(sandbox.state).toBe('paused');
    await sandbox.resume();
    expect(sandbox.state).toBe('running');
  },
  async 'fork-memory'(subject) {
    const sandbox = await subject.sandbox();
    const moment = await sandbox.takeMoment();
    expect(existsSync(moment.folder)).toBe(true);
    await moment.discard();
    expect(existsSync(moment.folder)).toBe(false);
    expect(sandbox.state).toBe('running');
  },
  async 'pack-diff'(subject) {
    const sandbox = await subject.sandbox();
    expect(typeof (await sandbox.whileStill(async ({ upper }) => upper))).toBe('string');
  },
  async update(subject) {
    const sandbox = await subject.sandbox();
    for (const pids of [150, 200]) expect(await sandbox.update({ pids })).toMatchObject({ pids });
  },
  async usage(subject) {
    const used = await (await subject.sandbox()).usage();
    expect(used.memory?.usedBytes).toBeGreaterThan(0);
  },
  async screen(subject) {
    const machine = machineOf(await subject.sandbox(), 'screen');
    expect((await machine.screenshot()).subarray(1, 4).toString()).toBe('PNG');
    const vnc = await machine.connect(5900);
    const [hello] = (await once(vnc, 'data')) as [Buffer];
    expect(String(hello)).toMatch(/^RFB 003/);
    vnc.destroy();
  },
  async clipboard(subject) {
    const machine = machineOf(await subject.sandbox(), 'clipboard');
    await machine.setClipboard('clipboard', { type: 'text/plain', bytes: Buffer.from('text') });
    expect(String(await machine.getClipboard('clipboard', 'text/plain'))).toBe('text');
  },
  async console(subject) {
    const machine = machineOf(await subject.sandbox(), 'console');
    const serial = await machine.console();
    const heard = new Promise<string>((resolve) => {
      let all = '';
      const end = serial.follow((bytes) => {
        all += bytes.toString('latin1');
        if (!all.includes('k')) return;
        end();
        resolve(all);
      });
    });
    // Firmware that is still at work loses keys.
    const pressing = setInterval(() => void machine.act([{ type: 'key', keys: ['k'] }]).catch(() => {}), 500);
    expect(await heard).toContain('k');
    clearInterval(pressing);
  },
};

/** As the routes of screens do (control/runtime-service/screen-routes.ts). */
function machineOf(sandbox: NodeSandbox, capability: Capability): FullVmSandbox {
  if (sandbox instanceof FullVmSandbox) return sandbox;
  throw unsupported(sandbox.backend.name, capability);
}

/** A command of a sandbox, whole. */
export async function runIn(sandbox: NodeSandbox, { files: _in, fetch: _out, stdin, ...spec }: TaskCommand) {
  const command = await sandbox.exec({ ...spec, stdin: stdin !== undefined } satisfies ExecSpec);
  const written = stdin === undefined ? undefined : command.write(stdin).then(() => command.closeStdin());
  const [stdout, stderr] = await outputOf(command);
  await written;
  return { exitCode: (await command.wait()).exitCode, stdout, stderr, files: {} };
}

async function outputOf(command: ExecHandle): Promise<[Buffer, Buffer]> {
  const parts: Record<'stdout' | 'stderr', Buffer[]> = { stdout: [], stderr: [] };
  for await (const { stream, bytes } of command.output()) if (bytes !== undefined) parts[stream].push(bytes);
  return [Buffer.concat(parts.stdout), Buffer.concat(parts.stderr)];
}

/** The same as a task. */
export async function runTask(node: FnCallNode, pool: Pool, spec: TaskCommand) {
  const { files, ...result } = commandResult(await node.run(pool, commandTask(spec)), String(spec.args[0]));
  return { ...result, files: Object.fromEntries(files.map(({ path, content }) => [path, String(content)])) };
}
