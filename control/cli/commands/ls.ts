/** `dsec ls`: names and attributes in an image, read from the EROFS itself. */
import { fromText } from '#base';
import { list, openImage, openTree } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { openChosenStore, type StoreOption, withStore } from '../store-option.ts';

interface Options extends StoreOption {
  readonly long?: boolean;
  readonly recursive?: boolean;
  readonly json?: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Lists files of an image without mounting it: the merged tree of all its layers, as ls -a would show it mounted. Owners are numbers and ' +
    'times are UTC. Needs no privilege. With --json one object a line.',
  examples: [
    { line: 'dsec ls web:1 /etc', what: 'names in a folder' },
    { line: 'dsec ls -lR web:1', what: 'everything, with attributes' },
    {
      line: "dsec ls -R --json web:1 /usr | jq -r 'select(.sizeBytes > 1000000) | .path'",
      what: 'paths of large files',
    },
  ],
  json: 'an object a path: `path`, `kind`, `mode`, `sizeBytes`, `nlink`, `uid`, `gid`, `mtimeSec`, `mtimeNsec`, `ino`, `layer` (from 1), `target` of a link, `major` and `minor` of a device',
  exactPaths: { arguments: true },
  configure(command, { output, signal }) {
    withStore(command)
      .argument('<image>', 'name or digest')
      .argument('[paths...]', 'paths in the image; its root by default')
      .option('-l, --long', 'mode, links, owner, size and time too')
      .option('-R, --recursive', 'folders in folders too')
      .option('--json', 'print one JSON object a line')
      .action(async (name: string, paths: string[], options: Options) => {
        const store = await openChosenStore(options);
        const tree = await openTree(store, await openImage(store, name));
        try {
          const wanted = paths.length === 0 ? ['/'] : paths;
          for (const path of wanted) {
            if (wanted.length > 1 && !options.json && !options.recursive) await output.line(`${path}:`);
            for (const piece of list(tree, fromText(path), options)) {
              if (signal.aborted) return;
              await output.write(piece);
            }
          }
        } finally {
          await tree.close();
        }
      });
  },
};
