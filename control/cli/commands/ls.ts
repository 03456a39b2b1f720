/** `dsec ls` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Lists files.',
  examples: [{ line: 'dsec ls -lR web:1 /etc', what: 'everything below /etc' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .argument('[paths...]')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'ls' });
      });
  },
};
