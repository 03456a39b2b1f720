/** `dsec umount`: ends a mount, and the layers nobody else uses. */
import { unmount } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Unmounts what `dsec mount` mounted, named by its folder or its id, and the EROFS layers that no other mount uses. While a process ' +
    'uses the mount it is refused, and the process is named. With --lazy it disappears at once, from `dsec mounts` too; a process that uses it keeps what it ' +
    'has open, and the kernel lets go of the rest when the last one ends.',
  examples: [
    { line: 'dsec umount /mnt', what: 'by folder' },
    { line: 'dsec umount --lazy /mnt', what: 'although something still uses it' },
  ],
  json: 'an object: `id`, `target`, `image`',
  exactPaths: { arguments: true },
  configure(command, { output }) {
    withJson(command)
      .argument('<target>', 'the folder, or the id that `dsec mounts` shows')
      .option('-l, --lazy', 'detach it now, although something uses it')
      .action(async (target: string, options: JsonOption & { lazy?: boolean }) => {
        const record = await unmount(target, { lazy: options.lazy ?? false });
        if (options.json) return output.json({ id: record.id, target: record.target, image: record.image });
        await output.line(`unmounted ${record.target}`);
      });
  },
};
