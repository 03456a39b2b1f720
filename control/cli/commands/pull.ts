/** `dsec pull` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Fetches a converted image.',
  examples: [{ line: 'dsec pull docker://127.0.0.1:5000/web:1 --insecure', what: 'from a registry' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<source>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'pull' });
      });
  },
};
