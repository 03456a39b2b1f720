/** The steps of control/sdk/scenarios.json in TypeScript; control/sdk/python/tests/scenario_steps.py has the same in Python. */
import { createHash } from 'node:crypto';
import * as fs from 'node:fs';
import { join } from 'node:path';
import {
  type Command,
  type CommandResult,
  DSecClient,
  type ExecResult,
  type FnCallTask,
  type Sandbox,
  type ShellResult,
  type ShellSession,
} from '../../sdk/typescript/src/index.ts';

export interface Site {
  readonly client: DSecClient;
  readonly url: string;
  readonly image: string;
  readonly folder: string;
  sandbox: Sandbox;
  command?: Command;
  shell?: ShellSession;
  started?: Promise<ShellResult>;
}

type With = Readonly<Record<string, unknown>>;
type Step = (site: Site, given: With) => Promise<unknown>;

export function pattern(count: number): Buffer {
  return Buffer.alloc(count, 'some bytes\0\xff', 'latin1');
}

export function sha256(bytes: Buffer): string {
  return createHash('sha256').update(bytes).digest('hex');
}

export const TREE_TEXT = `${sha256(pattern(9_000_000))}\nsmall\nsmall\n0\n-rwxr-x---`;

function resultView(result: CommandResult) {
  const { exitCode, signal, timedOut, ok, stdout, stderr, stdoutRaw, stderrRaw } = result;
  return {
    exit_code: exitCode,
    signal,
    timed_out: timedOut,
    ok,
    stdout,
    stderr,
    stdout_base64: stdoutRaw.toString('base64'),
    stdout_count: stdoutRaw.length,
    stderr_count: stderrRaw.length,
    stdout_sha256: sha256(stdoutRaw),
    stdout_missing: result.stdoutMissingBytes,
  };
}

function endView({ exitCode, signal, timedOut }: ExecResult) {
  return { exit_code: exitCode, signal, timed_out: timedOut };
}

export function runOptions(given: With) {
  const {
    timeout,
    input_base64: base64,
    input_bytes: count,
  } = given as { timeout?: number; input_base64?: string; input_bytes?: number };
  const input = base64 !== undefined ? Buffer.from(base64, 'base64') : count === undefined ? undefined : pattern(count);
  return {
    env: given.env as Record<string, string> | undefined,
    cwd: given.cwd as string | undefined,
    user: given.user as string | undefined,
    check: given.check as boolean | undefined,
    outputLimitBytes: given.output_limit as number | undefined,
    timeoutMs: timeout === undefined ? undefined : timeout * 1000,
    input,
  };
}

const text = (given: With, name: string) => given[name] as string;

export const STEPS: Readonly<Record<string, Step>> = {
  run_shell: async ({ sandbox }, given) =>
    resultView(await sandbox.runShell(text(given, 'command'), runOptions(given))),
  run: async ({ sandbox }, given) => resultView(await sandbox.run(given.args as string[], runOptions(given))),
  exec: async (site, given) => {
    const { args, stdin, background } = given as { args: string[]; stdin?: boolean; background?: boolean };
    site.command = await site.sandbox.exec(args, { stdin, background });
  },
  write_stdin: ({ command }, given) => command!.write(text(given, 'text')),
  close_stdin: ({ command }) => command!.closeStdin(),
  collect: async ({ command }) => resultView(await command!.collect()),
  wait: async ({ command }) => endView(await command!.wait({ timeoutMs: 60_000 })),
  signal: ({ command }, given) => command!.signal(text(given, 'signal')),
  kill: ({ command }) => command!.kill(),
  read_until: async ({ command }, given) => {
    let seen = '';
    for await (const bytes of command!.bytes('stdout')) {
      seen += bytes.toString();
      if (seen.includes(text(given, 'text'))) return;
    }
    throw new Error(`it ended with ${seen}`);
  },
  reattach: async (site) => {
    site.command = site.client.attach(site.sandbox.id).command(site.command!.id);
  },
  output_from: async ({ command }, given) => {
    let stdout = '';
    for await (const part of command!.output({ stdout: given.stdout as number, stderr: false })) stdout += part.bytes;
    return { stdout };
  },
  command_again: async ({ sandbox }, given) => {
    const options = { requestId: text(given, 'request_id') };
    const [one, other] = [await sandbox.exec(['true'], options), await sandbox.exec(['true'], options)];
    return { same: one.id === other.id };
  },
  fault: async ({ url }, given) => {
    await fetch(`${url}/test/faults`, { method: 'POST', body: JSON.stringify(given) });
  },
  clear: async ({ url }) => {
    await fetch(`${url}/test/faults`, { method: 'DELETE' });
  },
  seen: async ({ url }, given) => {
    const { seen } = (await (await fetch(`${url}/test/faults`)).json()) as { seen: string[] };
    return { count: seen.filter((line) => new RegExp(text(given, 'match')).test(line)).length };
  },
  wrong_token: async ({ url }) => {
    await using client = new DSecClient({ url, token: 'wrong' });
    await client.listSandboxes();
  },
  mkdir: ({ sandbox }, given) => sandbox.files.mkdir(text(given, 'path'), { parents: given.parents as boolean }),
  write: ({ sandbox }, given) => {
    const content = given.base64 === undefined ? text(given, 'text') : Buffer.from(text(given, 'base64'), 'base64');
    return sandbox.files.write(text(given, 'path'), content, { mode: given.mode as number | undefined });
  },
  read: async ({ sandbox }, given) => {
    const bytes = await sandbox.files.read(text(given, 'path'));
    return { text: bytes.toString(), base64: bytes.toString('base64') };
  },
  read_stream: async ({ sandbox }, given) => {
    let count = 0;
    const options = { offset: given.offset as number };
    for await (const bytes of sandbox.files.readStream(text(given, 'path'), options)) count += bytes.length;
    return { count };
  },
  stat: ({ sandbox }, given) => sandbox.files.stat(text(given, 'path')),
  list: async ({ sandbox }, given) => {
    const entries = await sandbox.files.list(text(given, 'path'));
    return {
      entries: entries
        .map(({ name, kind }) => `${name} ${kind}`)
        .sort()
        .join(','),
    };
  },
  rename: ({ sandbox }, given) => sandbox.files.rename(text(given, 'from'), text(given, 'to')),
  remove: ({ sandbox }, given) => sandbox.files.remove(text(given, 'path'), { recursive: given.recursive as boolean }),
  symlink: ({ sandbox }, given) => sandbox.files.symlink(text(given, 'target'), text(given, 'path')),
  readlink: async ({ sandbox }, given) => ({ target: await sandbox.files.readlink(text(given, 'path')) }),
  digest: async ({ sandbox }, given) => ({ sha256: await sandbox.files.digest(text(given, 'path')) }),
  make_tree: async ({ folder }) => {
    const tree = join(folder, 'tree');
    fs.mkdirSync(join(tree, 'sub'), { recursive: true });
    fs.mkdirSync(join(tree, 'empty-folder'));
    fs.writeFileSync(join(tree, 'big'), pattern(9_000_000));
    fs.writeFileSync(join(tree, 'sub/small'), 'small\n');
    fs.writeFileSync(join(tree, 'exec'), '#!/bin/sh\n', { mode: 0o750 });
    fs.symlinkSync('sub/small', join(tree, 'link'));
  },
  upload_tree: ({ sandbox, folder }, given) => sandbox.files.upload(join(folder, 'tree'), text(given, 'to')),
  download_tree: async ({ sandbox, folder }, given) => {
    const back = join(folder, 'back');
    await sandbox.files.download(text(given, 'from'), back);
    const list = (at: string) => (fs.readdirSync(at, { recursive: true }) as string[]).sort();
    const same =
      list(back).join() === list(join(folder, 'tree')).join() &&
      fs.readFileSync(join(back, 'big')).equals(pattern(9_000_000)) &&
      fs.readlinkSync(join(back, 'link')) === 'sub/small' &&
      (fs.statSync(join(back, 'exec')).mode & 0o777) === 0o750;
    return { same };
  },
  watch: async ({ sandbox }, given) => {
    const events: string[] = [];
    const watch = await sandbox.files.watch(text(given, 'path'));
    await sandbox.files.write(text(given, 'then_write'), 'x');
    for await (const { event, path } of watch) {
      events.push(`${event} ${path}`);
      if (path === 'new') break;
    }
    return { events: events.join(',') };
  },
  shell_open: async (site, given) => {
    site.shell = await site.sandbox.openShell(given as object);
  },
  shell_run: async ({ shell }, given) => {
    const timeout = given.timeout as number | undefined;
    const result = await shell!.run(text(given, 'command'), {
      timeoutMs: timeout === undefined ? undefined : timeout * 1000,
    });
    return shellView(result);
  },
  shell_start: async (site, given) => {
    site.started = site.shell!.run(text(given, 'command'));
    site.started.catch(() => {});
  },
  shell_result: async ({ started }) => shellView(await started!),
  shell_expect: async ({ shell }, given) => {
    const wanted = given.regex === undefined ? text(given, 'text') : new RegExp(text(given, 'regex'));
    const timeout = given.timeout as number | undefined;
    const { match } = await shell!.expect(wanted, { timeoutMs: timeout === undefined ? undefined : timeout * 1000 });
    return { match: match[0], group: match[1] };
  },
  shell_send: ({ shell }, given) => shell!.send(text(given, 'text')),
  shell_interrupt: ({ shell }) => shell!.interrupt(),
  shell_resize: ({ shell }, given) => shell!.resize(given.rows as number, given.columns as number),
  shell_close: ({ shell }) => shell!.close(),
  state: async ({ sandbox }) => {
    const { state } = await sandbox.view();
    return { state, id: sandbox.id, edge: sandbox.edge };
  },
  pause: async ({ sandbox }) => ({ paused_at: (await sandbox.pause()).pausedAt }),
  resume: ({ sandbox }) => sandbox.resume(),
  usage: async ({ sandbox }) => ({ pids: String((await sandbox.usage()).pids) }),
  clipboard_get: async ({ sandbox }) => ({ text: await sandbox.screen.clipboard.text() }),
  clipboard_set: ({ sandbox }, given) => sandbox.screen.clipboard.setText(text(given, 'text')),
  network: async ({ sandbox }) => ({ mode: (await sandbox.network()).mode }),
  port: async ({ client, sandbox }) => {
    await sandbox.files.write('/tmp/index.html', 'from inside');
    await using server = await sandbox.exec(['busybox', 'httpd', '-f', '-p', '8080', '-h', '/tmp'], {
      background: true,
    });
    for (let tries = 0; ; tries++) {
      const answer = await fetch(sandbox.getUrl(8080, '/index.html'), { headers: client.headers });
      const told = await answer.text();
      if (told === 'from inside') return;
      if (tries > 300) throw new Error(`port of command ${server.id}: ${told}`);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  },
  list_sandboxes: async ({ client, sandbox }) => {
    const { sandboxes, unreachable } = await client.listSandboxes();
    return { has_own: sandboxes.some(({ id }) => id === sandbox.id), unreachable: unreachable.length };
  },
  create: async (site, given) => {
    const timeout = given.timeout as number | undefined;
    site.sandbox = await site.client.runContainer(
      {
        containerImage: (given.container_image as string) ?? site.image,
        name: given.name as string | undefined,
        ttlRunningStop: given.ttl_running_stop as number | undefined,
        memoryLimitMb: given.memory_limit_mb as number | undefined,
        cpuCoresLimit: given.cpu_cores_limit as number | undefined,
        pidsLimit: given.pids_limit as number | undefined,
        initUser: given.init_user as string | undefined,
        workdir: given.workdir as string | undefined,
        env: given.env as Record<string, string> | undefined,
      },
      { timeoutMs: timeout === undefined ? undefined : timeout * 1000 },
    );
  },
  get: async ({ client }, given) => {
    await client.getSandbox(text(given, 'id'));
  },
  stop: ({ sandbox }) => sandbox.stop({ graceMs: 500 }),
  fncall: async ({ client, image }, given) => {
    const { status, run, files } = await client.fncall.run({ image, ...given } as FnCallTask & { image: string });
    return { status, exit_code: run?.exitCode, stdout: run?.stdout.toString(), file: files['out.txt']?.toString() };
  },
  run_fncall: async ({ client, image }, given) => {
    const { language, code, memory_limit_mb, time_limit_seconds } = given;
    const { status, run } = await client.runFncall({
      containerImage: image,
      language: String(language),
      code: code as string,
      memoryLimitMb: memory_limit_mb as number | undefined,
      timeLimitSeconds: time_limit_seconds as number | undefined,
    });
    return { status, stdout: run?.stdout.toString() };
  },
  run_microvm: async ({ client, image }) => void (await client.runMicrovm({ image })),
  run_vm: async ({ client, image }) => void (await client.runVm({ image })),
  batch: async ({ client, image }, given) => {
    const made: Sandbox[] = [];
    const indexes: number[] = [];
    for await (const { index, sandbox } of client.runContainers(
      { containerImage: image },
      { count: given.count as number },
    )) {
      indexes.push(index);
      if (sandbox !== undefined) made.push(sandbox);
    }
    await Promise.all(made.map((one) => one.remove({ force: true })));
    return { indexes: indexes.sort().join(','), ready: made.length, ids: new Set(made.map(({ id }) => id)).size };
  },
  fork: async ({ sandbox }, given) => {
    const forks = await sandbox.fork({ count: given.count as number, memory: given.memory as boolean | undefined });
    const texts = await Promise.all(forks.map((one) => one.files.readText(text(given, 'read'))));
    await Promise.all(forks.map((one) => one.remove({ force: true })));
    return { count: forks.length, texts: texts.join(',') };
  },
  pack_diff: async ({ sandbox }, given) => {
    const { name, digest } = await sandbox.packDiff(text(given, 'name'));
    return { name, digest };
  },
};

function shellView({ exitCode, stdout, stderr, timedOut, lost }: ShellResult) {
  return { exit_code: exitCode, stdout, stderr, timed_out: timedOut, lost };
}
