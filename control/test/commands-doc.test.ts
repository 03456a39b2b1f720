/** docs/commands.md says what every command's help says. `UPDATE_DOCS=1 npx vitest run control/test/commands-doc.test.ts` writes it anew. */
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough } from 'node:stream';
import { fileURLToPath } from 'node:url';
import { Command } from 'commander';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { CommandDefinition, Example } from '../cli/command.ts';
import { commandTable } from '../cli/command-table.ts';
import { Output } from '../cli/output.ts';
import { runCommand } from './command-run.ts';

const PAGE = fileURLToPath(new URL('../../docs/commands.md', import.meta.url));
const FOLDER = fileURLToPath(new URL('../../docs/', import.meta.url));

function configured(name: string, definition: CommandDefinition): Command {
  const command = new Command('dsec').command(name);
  definition.configure(command, {
    signal: new AbortController().signal,
    output: new Output(new PassThrough(), new PassThrough(), () => {}),
    progress: () => {},
    defer: () => {},
    takeSignals: () => {},
    exitCode: 0,
  });
  return command;
}

const cell = (text: string) => text.replaceAll('|', '\\|');

function tableOf(command: Command): string[] {
  const rows = [
    ...command.registeredArguments.map((argument) => {
      const name = `${argument.name()}${argument.variadic ? '...' : ''}`;
      return `| \`${argument.required ? `<${name}>` : `[${name}]`}\` | ${cell(argument.description)} |`;
    }),
    ...command.options.map((option) => {
      const shown = typeof option.defaultValue === 'string' ? ` (default: ${option.defaultValue})` : '';
      return `| \`${option.flags}\` | ${cell(option.description)}${shown} |`;
    }),
  ];
  return rows.length === 0 ? [] : ['', '| | |', '| --- | --- |', ...rows];
}

function examplesText(examples: readonly Example[]): string[] {
  return ['', ...examples.flatMap(({ line, what }, i) => [...(i === 0 ? [] : ['']), `    # ${what}`, `    ${line}`])];
}

async function page(): Promise<string> {
  const lines = [
    '# Commands',
    '',
    'What `dsec COMMAND --help` says, in one page, and what `--json` prints. With `--json`, results go to stdout as JSON, and an error',
    'to stderr as `{"error":{"code","message","hint"}}`; [errors.md](errors.md) lists the codes. Fields that do not apply are absent.',
  ];
  for (const { name, summary, load } of commandTable) {
    const { definition } = await load();
    const command = configured(name, definition);
    lines.push('', `## dsec ${name}`, '', `*${summary}*`, '', definition.description.trim(), ...tableOf(command));
    for (const part of command.commands) {
      lines.push('', `### dsec ${name} ${part.name()}`, '', part.description(), ...tableOf(part));
    }
    lines.push(...examplesText(definition.examples));
    if (definition.json !== undefined) lines.push('', `JSON: ${definition.json}.`);
  }
  return `${lines.join('\n')}\n`;
}

test('docs/commands.md holds every command as it is', async () => {
  const expected = await page();
  if (process.env.UPDATE_DOCS) writeFileSync(PAGE, expected);
  expect(readFileSync(PAGE, 'utf8')).toBe(expected);
});

test('docs/README.md names every page', () => {
  const index = readFileSync(join(FOLDER, 'README.md'), 'utf8');
  for (const name of readdirSync(FOLDER).filter((file) => file.endsWith('.md') && file !== 'README.md')) {
    expect(index).toContain(`](${name})`);
  }
});

test('every command that prints JSON says what', async () => {
  for (const { name, load } of commandTable) {
    const { definition } = await load();
    const command = configured(name, definition);
    const takesJson = [command, ...command.commands].some((part) => part.options.some(({ long }) => long === '--json'));
    expect([name, definition.json !== undefined]).toEqual([name, takesJson]);
  }
});

describe('what --json prints is what the page says', () => {
  let folder: string;
  const store = () => join(folder, 'store');
  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-commands-doc-'));
    writeFileSync(join(folder, 'file'), 'text');
    await runCommand('convert', `dir:${folder}`, '--name', 'a:1', '--store', store());
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  test.each([
    ['convert', 'dir:FOLDER', '--name', 'b:1'],
    ['diff', 'a:1', 'b:1'],
    ['images'],
    ['inspect', 'a:1'],
    ['ls', '-R', 'a:1'],
    ['cat', 'a:1', '/file'],
    ['stat', 'a:1', '/file', '/'],
    ['dump', 'a:1', '/file'],
    ['export', 'a:1', '-o', '/dev/null'],
    ['verify', '--repair', 'a:1'],
    ['push', 'a:1', 'oci:FOLDER/layout'],
    ['pull', 'oci:FOLDER/layout', '--name', 'c:1'],
    ['tag', 'a:1', 'd:1', 'c:1'],
    ['rm', 'c:1'],
    ['gc'],
    ['doctor', '--all'],
    ['version'],
  ])('%s', async (name, ...args) => {
    const argv = args.map((arg) => arg.replace('FOLDER', folder));
    const { definition } = await commandTable.find((entry) => entry.name === name)!.load();
    const takesStore = name !== 'version';
    const { text } = await runCommand(name, ...argv, '--json', ...(takesStore ? ['--store', store()] : []));
    const told = new Set([...definition.json!.matchAll(/`(\w+)`/g)].map((match) => match[1]));
    for (const line of text.trim().split('\n').filter(Boolean)) {
      for (const object of [JSON.parse(line)].flat())
        expect([...told]).toEqual(expect.arrayContaining(Object.keys(object)));
    }
  });
});
