import { spawn, spawnSync } from 'node:child_process';
import { chmodSync, chownSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { constants, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { commandTable } from '../cli/command-table.ts';
import { projectVersion } from '../cli/version.ts';
import { runCommand } from './command-run.ts';

const dsec = join(import.meta.dirname, '../../bin/dsec');
let store: string;

beforeAll(() => {
  store = mkdtempSync(join(tmpdir(), 'dsec-cli-'));
});
afterAll(() => rmSync(store, { recursive: true, force: true }));

function run(...args: string[]) {
  return spawnSync(process.execPath, [dsec, ...args], { encoding: 'utf8', env: { ...process.env, DSEC_STORE: store } });
}

describe('dsec', () => {
  it('prints its version', () => {
    expect(run('--version')).toMatchObject({ status: 0, stdout: `${projectVersion()}\n`, stderr: '' });
    expect(JSON.parse(run('version', '--json').stdout)).toMatchObject({
      dsec: projectVersion(),
      node: process.versions.node,
    });
  });

  it('lists every command in its help, which is also what it prints alone', () => {
    const { status, stdout } = run('--help');
    expect(status).toBe(0);
    for (const { name, summary } of commandTable) {
      expect(stdout.replace(/\s+/g, ' ')).toContain(`${name} ${summary}`);
    }
    expect(run().stdout).toBe(stdout);
    expect(run('help').stdout).toBe(stdout);
  });

  it.each(commandTable.map(({ name }) => name))('%s --help has a description and an example', async (name) => {
    const { text } = await runCommand(name, '--help');
    expect(text).toContain(`Usage: dsec ${name}`);
    expect(text).toMatch(new RegExp(`Examples:\n {2}# .+\n {2}(?:\\S+ \\| |sudo )?dsec ${name}`));
    const { definition } = await commandTable.find((entry) => entry.name === name)!.load();
    expect(definition.description.length).toBeGreaterThan(40);
    expect(definition.examples.length).toBeGreaterThan(0);
  });

  // Root may read anything: the command runs as nobody.
  it.skipIf(process.getuid?.() !== 0)('exits with 5 where a source may not be read', () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-denied-'));
    try {
      const own = join(folder, 'own');
      mkdirSync(own);
      chownSync(own, 65534, 65534);
      mkdirSync(join(folder, 'tree'));
      writeFileSync(join(folder, 'tree/secret'), 'x', { mode: 0o600 });
      writeFileSync(join(folder, 'secret.tar'), Buffer.alloc(1024), { mode: 0o600 });
      mkdirSync(join(folder, 'layout'), { mode: 0o700 });
      chmodSync(folder, 0o755);
      run('--version'); // Makes the bundle, which nobody may not.
      const env = { ...process.env, DSEC_STORE: join(own, 'store'), HOME: own };
      const asNobody = (...args: string[]) =>
        spawnSync(process.execPath, [dsec, ...args], { encoding: 'utf8', env, uid: 65534, gid: 65534 });
      for (const [command, source] of [
        ['convert', `dir:${folder}/tree`],
        ['convert', `tar:${folder}/secret.tar`],
        ['convert', `oci:${folder}/layout`],
        ['pull', `oci:${folder}/layout`],
      ] as const) {
        const { status, stderr } = asNobody(command, source, '--name', 'n:1');
        expect([command, source, status, stderr]).toEqual([command, source, 5, expect.stringMatching(/permission/)]);
      }
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });

  it('shows the same help for `help COMMAND`', () => {
    expect(run('help', 'ls').stdout).toBe(run('ls', '--help').stdout);
  });
});

describe('errors', () => {
  it('name what is wrong and the remedy, on stderr, with status 2 for usage', () => {
    expect(run('lss')).toMatchObject({
      status: 2,
      stdout: '',
      stderr: "dsec: unknown command 'lss' (Did you mean ls?)\n      `dsec --help` shows how it is used\n",
    });
    expect(run('ls')).toMatchObject({
      status: 2,
      stdout: '',
      stderr: "dsec: missing required argument 'image'\n      `dsec ls --help` shows how it is used\n",
    });
    expect(run('ls', 'x', '--colour').stderr).toContain("unknown option '--colour'");
  });

  it('are one JSON object on stderr with --json', () => {
    const { status, stdout, stderr } = run('images', '--json', '--nothing');
    expect([status, stdout]).toEqual([2, '']);
    expect(JSON.parse(stderr)).toEqual({
      error: {
        code: 'CLI_USAGE',
        message: "unknown option '--nothing'",
        hint: '`dsec images --help` shows how it is used',
      },
    });
  });

  it('are not turned into JSON by a --json of the command that `run` starts', () => {
    expect(run('run', '--nothing', 'image', '--', 'tool', '--json').stderr).toMatch(/^dsec: /);
  });
});

describe('a reader that leaves early', () => {
  it('ends the command quietly', async () => {
    const child = spawn(
      'bash',
      ['-c', `set -o pipefail; ${process.execPath} ${dsec} --help | true; echo "\${PIPESTATUS[0]}"`],
      {
        env: { ...process.env, DSEC_STORE: store },
      },
    );
    let output = '';
    let errors = '';
    child.stdout.on('data', (chunk) => {
      output += chunk;
    });
    child.stderr.on('data', (chunk) => {
      errors += chunk;
    });
    await new Promise((resolve) => child.once('close', resolve));
    expect(errors).toBe('');
    // Whether the reader leaves before or after the write is chance; neither is an error.
    expect(['0\n', '141\n']).toContain(output);
  });
});

describe('signals', () => {
  /** A command that waits for its input, once it has its handlers. */
  async function waiting() {
    const child = spawn(process.execPath, [dsec, 'convert', '--batch', '-'], {
      env: { ...process.env, DSEC_STORE: store },
      stdio: ['pipe', 'pipe', 'pipe'],
    });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (chunk) => {
        output += chunk;
      });
    }
    const ended = new Promise<number | null>((resolve) => child.once('close', resolve));
    // Node has handlers of its own for SIGINT and SIGTERM from the start; ours for SIGQUIT is the last one.
    const last = 1n << BigInt(constants.signals.SIGQUIT - 1);
    const caught = () => {
      const mask = /^SigCgt:\s*([0-9a-f]+)$/m.exec(readFileSync(`/proc/${child.pid}/status`, 'utf8'))?.[1];
      return (BigInt(`0x${mask ?? 0}`) & last) !== 0n;
    };
    while (child.exitCode === null && !caught()) await new Promise((resolve) => setTimeout(resolve, 20));
    return { child, ended, output: () => output };
  }

  it.each([
    ['SIGINT', 130],
    ['SIGTERM', 143],
    ['SIGHUP', 129],
  ] as const)('%s ends a command with %i and without a word', async (signal, status) => {
    const { child, ended, output } = await waiting();
    child.kill(signal);
    expect([await ended, output()]).toEqual([status, '']);
  });
});
