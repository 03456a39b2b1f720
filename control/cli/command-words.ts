/**
 * Where the words of a command that is to be run begin: `exec web ls -la`. The first of them is behind so many operands of our own command, and options from there on
 * are its own, as container engines have it; a `--` says the same, and is not needed.
 */
import type { Command } from 'commander';

const operandsBefore = new WeakMap<Command, number>();

/** `operands`: how many are this command's own. */
export function runsWordsAfter(operands: number, command: Command): Command {
  operandsBefore.set(command, operands);
  return command;
}

/** The same arguments, with a `--` where the words begin. What cannot be told stays as it is, for the parser to refuse. */
export function separated(command: Command, args: readonly string[]): readonly string[] {
  const own = operandsBefore.get(command);
  if (own === undefined) return args;
  let operands = 0;
  for (let at = 0; at < args.length; at++) {
    const arg = args[at]!;
    if (arg === '--') return args;
    if (arg.length < 2 || !arg.startsWith('-')) {
      if (operands === own) return [...args.slice(0, at), '--', ...args.slice(at)];
      operands++;
      continue;
    }
    const takes = takesNext(command, arg);
    if (takes === undefined) return args;
    if (takes) at++;
  }
  return args;
}

/** Whether the next argument is the value of this option; undefined: there is no such option. */
function takesNext(command: Command, arg: string): boolean | undefined {
  const known = (flag: string) => command.options.find(({ short, long }) => short === flag || long === flag);
  const whole = known(arg);
  if (whole !== undefined) return whole.required;
  if (arg === '--help' || arg === '-h') return false;
  if (arg.startsWith('--')) return known(arg.split('=', 1)[0]!) === undefined ? undefined : false;
  // Several in one, as -tn; the last of them may have its value behind it, as -tu root, or in the same argument, as -turoot.
  for (let at = 1; at < arg.length; at++) {
    const option = known(`-${arg[at]}`);
    if (option === undefined) return undefined;
    if (option.required) return at === arg.length - 1;
  }
  return false;
}
