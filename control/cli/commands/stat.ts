/** `dsec stat` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Shows attributes.',
  examples: [{ line: 'dsec stat web:1 /bin/sh', what: 'one path' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .argument('<paths...>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'stat' });
      });
  },
};
