/**
 * Arguments and variables as they were given. Node takes both for UTF-8 and puts U+FFFD in the place of what is not,
 * which would make another path or value of it without a word. Where there is a U+FFFD, the exact bytes are looked up in
 * /proc. Arguments then hold stand-ins (see base's `textOf`), which only what knows them may get: the paths that a
 * command names in `exactPaths`. Everything else is refused.
 */
import { readFileSync } from 'node:fs';
import type { Command } from 'commander';
import { displayText, hasStandIns, textOf } from '#base';
import { fail } from '../errors.ts';

/** Which of a command's arguments may hold bytes that are not UTF-8. */
export interface ExactPaths {
  readonly arguments?: boolean;
  /** Names as commander has them: `output` of `--output`. */
  readonly options?: readonly string[];
}

const LOSSY = '\ufffd';

/** The last arguments of this process are `argv`; the same, with stand-ins where Node has lost bytes. */
export function exactArguments(argv: readonly string[], read: () => Buffer = commandLine): readonly string[] {
  if (!argv.some((text) => text.includes(LOSSY))) return argv;
  const exact = splitAtNul(read()).slice(-argv.length);
  const same = exact.length === argv.length && exact.every((bytes, i) => bytes.toString('utf8') === argv[i]);
  return same ? exact.map(textOf) : argv;
}

/** @throws CLI_NOT_UTF8 for what `command` cannot take byte for byte */
export function refuseInexact(command: Command, program: string, exact: ExactPaths = {}): void {
  const refuse = (what: string, value: unknown): void => {
    for (const text of Array.isArray(value) ? value : [value]) {
      if (typeof text !== 'string' || !hasStandIns(text)) continue;
      throw fail('CLI_NOT_UTF8', { program, what, text: displayText(text) });
    }
  };
  for (const [name, value] of Object.entries(command.opts())) {
    const option = command.options.find((known) => known.attributeName() === name);
    if (!exact.options?.includes(name)) refuse(`option ${option?.long ?? name}`, value);
  }
  if (!exact.arguments)
    command.args.forEach((text, i) => {
      refuse(`argument ${i + 1}`, text);
    });
}

/** @throws CLI_NOT_UTF8 when one of these variables, or of our own, holds what is not UTF-8 */
export function refuseInexactVariables(
  program: string,
  names: readonly string[],
  read: () => Buffer = environment,
): void {
  const suspects = [...names, ...Object.keys(process.env).filter((name) => name.startsWith('DSEC_'))];
  if (!suspects.some((name) => name.includes(LOSSY) || process.env[name]?.includes(LOSSY))) return;
  for (const entry of splitAtNul(read()).map(textOf)) {
    const name = entry.slice(0, entry.indexOf('='));
    if (!hasStandIns(entry) || !suspects.some((suspect) => suspect === name)) continue;
    throw fail('CLI_NOT_UTF8', { program, what: `variable ${displayText(name)}`, text: displayText(entry) });
  }
}

function splitAtNul(bytes: Buffer): Buffer[] {
  const parts: Buffer[] = [];
  for (let from = 0; from < bytes.length; ) {
    const end = bytes.indexOf(0, from);
    parts.push(bytes.subarray(from, end < 0 ? bytes.length : end));
    if (end < 0) break;
    from = end + 1;
  }
  return parts;
}

function commandLine(): Buffer {
  return readFileSync('/proc/self/cmdline');
}

function environment(): Buffer {
  return readFileSync('/proc/self/environ');
}
