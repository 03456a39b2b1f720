/** `dsec verify` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Checks an image.',
  examples: [{ line: 'dsec verify web:1', what: 'one image' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'verify' });
      });
  },
};
