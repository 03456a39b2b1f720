/** `dsec export`: an image's merged tree as a tar. */
import { humanSize } from '#base';
import { exportTar, openImage, openTree } from '#imagesvc';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { writeOutput } from '../output-file.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Writes the merged tree of an image as a tar with everything it knows: owners, sub-second times, extended attributes, hard links, devices. Without ' +
    '-o it goes to stdout, unless that is a terminal. A file appears only when it is whole.',
  examples: [
    { line: 'dsec export web:1 -o web.tar', what: 'to a file' },
    { line: 'dsec export web:1 | tar -t', what: 'into a pipe' },
  ],
  json: 'an object: `image`, `file`, `sizeBytes`, `notes`',
  exactPaths: { options: ['output'] },
  configure(command, context) {
    const { output } = context;
    withJson(withStore(command))
      .argument('<image>', 'name or digest')
      .option('-o, --output <file>', 'write to this file; - is stdout')
      .action(async (name: string, options: StoreOption & JsonOption & { output?: string }) => {
        const path = options.output ?? '-';
        if (path === '-' && (output.isTerminal || options.json)) {
          const why = options.json ? 'with --json' : 'a tar is not for a terminal:';
          throw fail('CLI_USAGE', { problem: `${why} name a file with -o`, program: 'dsec export' });
        }
        const store = await openChosenStore(options);
        const tree = await openTree(store, await openImage(store, name));
        try {
          const notes: string[] = [];
          const pieces = exportTar(tree, (text) => notes.push(text));
          const sizeBytes = await writeOutput(pieces, path, context);
          for (const note of notes) output.note(`${name}: ${note}`);
          if (options.json) await output.json({ image: name, file: path, sizeBytes, notes });
          else if (path !== '-') output.note(`${path}: ${humanSize(sizeBytes)}`);
        } finally {
          await tree.close();
        }
      });
  },
};
