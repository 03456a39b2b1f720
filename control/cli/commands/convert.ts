/** `dsec convert` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Converts.',
  examples: [{ line: 'dsec convert oci:layout:web --name web:1', what: 'from a layout' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<source>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'convert' });
      });
  },
};
