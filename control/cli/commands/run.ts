/** `dsec run` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Runs.',
  examples: [{ line: 'dsec run web:1 -- /bin/sh', what: 'a shell' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .argument('[command...]')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'run' });
      });
  },
};
