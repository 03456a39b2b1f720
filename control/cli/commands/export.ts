/** `dsec export` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Writes a tar.',
  examples: [{ line: 'dsec export web:1 -o web.tar', what: 'to a file' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'export' });
      });
  },
};
