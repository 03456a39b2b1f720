/** `dsec stat`: everything an image knows about a path. */
import { fromText } from '#base';
import { openImage, openTree, statJson, statPath, statText } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Shows all attributes of paths in an image, extended attributes too, and where they come from: the layer, and the extents of the data with ' +
    'the blob that holds them. A link is shown itself, unless -L is given.',
  examples: [
    { line: 'dsec stat web:1 /bin/sh', what: 'the link itself' },
    { line: 'dsec stat -L --json web:1 /bin/sh', what: 'what it leads to, as JSON' },
  ],
  json: 'an object a path: `path`, `kind`, `mode`, `sizeBytes`, `blocks`, `nlink`, `uid`, `gid`, `mtimeSec`, `mtimeNsec`, `ino`, `layer` and `mergedLayers` (from 1), `layerId`, `major`, `minor`, `target`, `xattrs`, `extents`, `moreExtents`',
  exactPaths: { arguments: true },
  configure(command, { output }) {
    withJson(withStore(command))
      .argument('<image>', 'name or digest')
      .argument('<paths...>', 'paths in the image')
      .option('-L, --dereference', 'follow a link at the end of the path')
      .action(async (name: string, paths: string[], options: StoreOption & JsonOption & { dereference?: boolean }) => {
        const store = await openChosenStore(options);
        const tree = await openTree(store, await openImage(store, name));
        try {
          for (const path of paths) {
            const stat = statPath(tree, fromText(path), options.dereference ?? false);
            if (options.json) await output.json(statJson(stat));
            else await output.write(statText(stat));
          }
        } finally {
          await tree.close();
        }
      });
  },
};
