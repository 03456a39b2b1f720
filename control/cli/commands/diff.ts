/** `dsec diff` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Compares two images.',
  examples: [{ line: 'dsec diff web:1 web:2', what: 'what version 2 changed' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<from>')
      .argument('<to>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'diff' });
      });
  },
};
