import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough } from 'node:stream';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { commandTable } from '../cli/command-table.ts';
import type { Context } from '../cli/context.ts';
import { runCommandLine } from '../cli/main.ts';
import { Output } from '../cli/output.ts';
import { projectVersion } from '../cli/version.ts';

const dsec = join(import.meta.dirname, '../../bin/dsec');
let store: string;

beforeAll(() => {
  store = mkdtempSync(join(tmpdir(), 'dsec-cli-'));
});
afterAll(() => rmSync(store, { recursive: true, force: true }));

function run(...args: string[]) {
  return spawnSync(process.execPath, [dsec, ...args], { encoding: 'utf8', env: { ...process.env, DSEC_STORE: store } });
}

/** The help of a command, made in this process. */
async function help(name: string): Promise<string> {
  const stdout = new PassThrough();
  const context: Context = {
    signal: new AbortController().signal,
    output: new Output(stdout, new PassThrough(), () => {}),
    progress: () => {},
    defer: () => {},
    takeSignals: () => {},
    exitCode: 0,
  };
  await runCommandLine([name, '--help'], context);
  return String(stdout.read());
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
    const text = await help(name);
    expect(text).toContain(`Usage: dsec ${name}`);
    expect(text).toMatch(new RegExp(`Examples:\n {2}# .+\n {2}(?:\\S+ \\| |sudo )?dsec ${name}`));
    const { definition } = await commandTable.find((entry) => entry.name === name)!.load();
    expect(definition.description.length).toBeGreaterThan(40);
    expect(definition.examples.length).toBeGreaterThan(0);
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
