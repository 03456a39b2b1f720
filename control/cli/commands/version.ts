/** `dsec version`: the version, and what it runs on. */
import type { CommandDefinition } from '../command.ts';
import { withJson } from '../store-option.ts';
import { projectVersion } from '../version.ts';

export const definition: CommandDefinition = {
  description: 'Prints the version of dsec, of Node and of the kernel.',
  examples: [{ line: 'dsec version --json', what: 'for a bug report' }],
  json: 'an object: `dsec`, `node`, `kernel`, `arch`',
  configure(command, { output }) {
    withJson(command).action(async (options: { json?: boolean }) => {
      const { release } = await import('node:os');
      const version = { dsec: projectVersion(), node: process.versions.node, kernel: release(), arch: process.arch };
      if (options.json) await output.json(version);
      else await output.line(`dsec ${version.dsec} (Node ${version.node}, Linux ${version.kernel}, ${version.arch})`);
    });
  },
};
