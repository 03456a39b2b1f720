/** `dsec cat` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Prints files.',
  examples: [{ line: 'dsec cat web:1 /etc/os-release', what: 'one file' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .argument('<paths...>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'cat' });
      });
  },
};
