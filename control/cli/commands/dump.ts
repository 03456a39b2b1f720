/** `dsec dump`: the on-disk format, for whoever debugs it. */
import { fromText } from '#base';
import { dump, dumpText, openImage, openTree } from '#imagesvc';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly nid?: string;
  readonly layer?: string;
}

export const definition: CommandDefinition = {
  description:
    "Shows an image as it is on disk: each layer's superblock and device slots; with a path the inode as each layer has it, its fields and its " +
    'extents; with --nid an inode that no path leads to.',
  examples: [
    { line: 'dsec dump web:1', what: 'superblocks and device slots' },
    { line: 'dsec dump web:1 /bin/sh', what: 'the inode and extents of a path' },
    { line: 'dsec dump web:1 --layer 1 --nid root', what: 'the root folder of the bottom layer alone' },
  ],
  json: 'an object: `image`, `layers`, `path`, `inodes`; what is in them follows the on-disk format',
  exactPaths: { arguments: true },
  configure(command, { output }) {
    withJson(withStore(command))
      .argument('<image>', 'name or digest')
      .argument('[path]', 'a path in the image; a link at its end is not followed')
      .option('--nid <number>', 'an inode of one layer, by the number that `dsec stat` shows, or root')
      .option('--layer <number>', 'the layer of --nid, 1 is the bottom', '1')
      .action(async (name: string, path: string | undefined, options: Options) => {
        const nid = options.nid === 'root' ? options.nid : number('--nid', options.nid);
        const layer = number('--layer', options.layer);
        if (path !== undefined && nid !== undefined) {
          throw fail('CLI_USAGE', { problem: 'give a path or --nid, not both', program: 'dsec dump' });
        }
        const store = await openChosenStore(options);
        const tree = await openTree(store, await openImage(store, name));
        try {
          const found = dump(tree, {
            path: path === undefined ? undefined : fromText(path),
            nid,
            layer,
          });
          if (options.json) await output.json(found);
          else await output.write(dumpText(found));
        } finally {
          await tree.close();
        }
      });
  },
};

function number(option: string, text: string | undefined): number | undefined {
  if (text === undefined) return undefined;
  const value = Number(text);
  if (!/^\d+$/.test(text) || !Number.isSafeInteger(value)) {
    throw fail('CLI_USAGE', { problem: `${option} ${text}: not a whole number`, program: 'dsec dump' });
  }
  return value;
}
