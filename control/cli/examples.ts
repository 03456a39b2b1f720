/** The examples below a command's help. */
import type { Command } from 'commander';
import type { Example } from './command.ts';

export function withExamples(command: Command, examples: readonly Example[]): Command {
  const text = examples.map(({ line, what }) => `  # ${what}\n  ${line}`).join('\n\n');
  return command.helpOption('-h, --help', 'show this help').addHelpText('after', `\nExamples:\n${text}`);
}
