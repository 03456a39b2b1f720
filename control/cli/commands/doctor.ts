/** `dsec doctor` */
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description: 'Doctor.',
  examples: [{ line: 'dsec doctor', what: 'all' }],
  configure(command) {
    withJson(withStore(command)).action(async () => {
      throw fail('CLI_NOT_IN_THIS_BUILD', { command: 'doctor' });
    });
  },
};
