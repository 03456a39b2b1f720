/** `dsec push` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Sends a converted image and everything it consists of.',
  examples: [{ line: 'dsec push web:1 docker://127.0.0.1:5000/web:1 --insecure', what: 'to a registry' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<image>')
      .argument('<destination>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'push' });
      });
  },
};
