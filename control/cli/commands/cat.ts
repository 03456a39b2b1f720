/** `dsec cat`: a file's verified bytes. */
import { fromText } from '#base';
import { cat, openImage, openTree } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { openChosenStore, type StoreOption, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Prints files of an image without mounting it. Links are followed inside the image. Only the parts of the data blob that hold the files are ' +
    'read, and each is checked against its digest first.',
  examples: [
    { line: 'dsec cat web:1 /etc/os-release', what: 'a file' },
    { line: 'dsec cat web:1 /usr/bin/tool > tool', what: 'a copy of a binary' },
  ],
  json: 'an object a path: `path`, `contentBase64`',
  exactPaths: { arguments: true },
  configure(command, { output, signal }) {
    withStore(command)
      .argument('<image>', 'name or digest')
      .argument('<paths...>', 'paths of files in the image')
      .option('--json', 'print one JSON object a file, its content in base64')
      .action(async (name: string, paths: string[], options: StoreOption & { json?: boolean }) => {
        const store = await openChosenStore(options);
        const tree = await openTree(store, await openImage(store, name));
        try {
          for (const path of paths) {
            const pieces: Buffer[] = [];
            for await (const piece of cat(tree, fromText(path))) {
              if (signal.aborted) return;
              if (options.json) pieces.push(Buffer.from(piece));
              else await output.write(piece);
            }
            if (options.json) await output.json({ path, contentBase64: Buffer.concat(pieces).toString('base64') });
          }
        } finally {
          await tree.close();
        }
      });
  },
};
