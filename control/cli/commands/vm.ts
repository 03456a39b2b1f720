/** `dsec vm`: what sandboxes in virtual machines need of this node. */
import { fetchGuestKernel, KERNEL_SERIES, runtimeFolders } from '#runtime';
import type { CommandDefinition } from '../command.ts';
import { withExamples } from '../examples.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { addVmTemplate } from './vm-template.ts';

export const definition: CommandDefinition = {
  description: 'What sandboxes in virtual machines (`dsec sandbox create --backend microvm`) need of this node.',
  examples: [
    { line: 'sudo dsec vm kernel', what: 'fetch a kernel for them' },
    { line: 'sudo dsec vm template ls', what: 'which sizes of machines need not boot' },
  ],
  json:
    'of `kernel` an object: `version`, `image`, `folder`; of `template make` one, of `template ls` a list of such: `template`, `cpus`, `memoryBytes`, `reporting`, `kernel`, ' +
    '`madeAt`, `usedAt`, `bytes`, `useful` (null: it is not known)',
  configure(command, context) {
    const { output, signal } = context;
    const kernel = withExamples(
      command
        .command('kernel')
        .description(
          'Fetches the kernel that guests run, a package of Debian, and unpacks it below $DSEC_STATE; nothing is installed. One that is there is taken as it is. ' +
            'Needs apt, with Debian 12 backports or a later Debian among its sources. $DSEC_VM_KERNEL names a folder with another one (boot/vmlinuz-*, lib/modules).',
        )
        .option('--series <version>', 'two numbers', KERNEL_SERIES),
      [
        { line: 'sudo dsec vm kernel', what: 'the newest of the series that guests are tested with' },
        { line: 'sudo dsec vm kernel --series 6.18', what: 'of another one' },
      ],
    );
    withJson(kernel).action(async ({ series, json }: JsonOption & { series: string }) => {
      const found = await fetchGuestKernel(runtimeFolders().stateDir, { series, signal });
      const { version, image, base } = found;
      if (json) await output.json({ version, image, folder: base });
      else await output.line(`Linux ${version} in ${base}`);
    });
    addVmTemplate(command, context);
  },
};
