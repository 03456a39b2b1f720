/** `dsec dump` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Shows the format.',
  examples: [{ line: 'dsec dump web:1', what: 'superblocks' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .argument('[path]')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'dump' });
      });
  },
};
