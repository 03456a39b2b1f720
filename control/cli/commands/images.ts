/** `dsec images`: what the store holds. */
import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { type Digest, humanSize } from '#base';
import { listImages } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { shortDigest } from '../digest-text.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

/** A damaged ref leads to no digest. */
function digestText(digest: Digest | undefined): string {
  return digest === undefined ? '' : shortDigest(digest);
}

/** Of a store that is a folder. */
function isMissing(url: string): boolean {
  return url.startsWith('file:') && !existsSync(fileURLToPath(url));
}

export const definition: CommandDefinition = {
  description:
    'Lists the images of the store: kind, number of EROFS or disk layers, size of their metadata (always local) and of their data (read on demand). ' +
    'Blobs that several images share count for each of them.',
  examples: [
    { line: 'dsec images', what: 'the images of the default store' },
    { line: "dsec images --json | jq -r '.[].name'", what: 'only their names' },
  ],
  json: 'an array: `name`, `digest`, `kind`, `layers` (how many), `metaBytes`, `dataBytes`, `sizeBytes`, `problem`',
  configure(command, { output }) {
    withJson(withStore(command)).action(async (options: StoreOption & JsonOption) => {
      const store = await openChosenStore(options);
      const images = await listImages(store);
      if (options.json) return output.json(images);
      if (images.length === 0) {
        const what = isMissing(store.url) ? `there is no store at ${store.url} yet` : 'no images';
        return output.note(`${what}; \`dsec convert\` makes one`);
      }
      await output.table(
        [
          { title: 'NAME' },
          { title: 'KIND' },
          { title: 'LAYERS', right: true },
          { title: 'METADATA', right: true },
          { title: 'DATA', right: true },
          { title: 'DIGEST' },
        ],
        images.map(({ name, kind, layers, metaBytes, dataBytes, digest, problem }) =>
          problem === undefined
            ? [name, kind ?? '', String(layers), humanSize(metaBytes), humanSize(dataBytes), digestText(digest)]
            : [name, 'damaged', '', '', '', digestText(digest)],
        ),
      );
      for (const { name, problem } of images) if (problem !== undefined) output.note(`${name}: ${problem}`);
    });
  },
};
