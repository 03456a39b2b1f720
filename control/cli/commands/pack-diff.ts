/** `dsec pack-diff` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Packs.',
  examples: [{ line: 'dsec pack-diff work --name web:2', what: 'a new image' }],
  configure(command) {
    withJson(withStore(command))
      .argument('<container>')
      .action(async () => {
        throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'pack-diff' });
      });
  },
};
