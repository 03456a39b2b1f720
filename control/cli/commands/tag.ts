/** `dsec tag`: more names for an image that is there. */
import { parseImageName, type TaggedImage, tagImage } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Gives an image of the store further names. Nothing is copied: the names mean the same digest, and its blobs stay as long as one of them does. A name that ' +
    'another image has is taken from it, as by `dsec convert`.',
  examples: [
    { line: 'dsec tag web:2 web:latest', what: 'the newest one' },
    { line: 'dsec tag 4f5c1e09aa72 keep/web:before', what: 'a name for one that has none' },
  ],
  json: 'an array: `name`, `digest`, `replaced` (digest that the name had before)',
  configure(command, { output }) {
    withJson(withStore(command))
      .argument('<image>', 'name or digest')
      .argument('<names...>', 'what it is called as well')
      .action(async (source: string, names: string[], options: StoreOption & JsonOption) => {
        // A wrong one among them, and none is given.
        for (const name of names) parseImageName(name);
        const store = await openChosenStore(options);
        const tagged: TaggedImage[] = [];
        for (const name of names) tagged.push(await tagImage(store, source, name));
        if (options.json) return output.json(tagged);
        for (const { name, digest, replaced } of tagged)
          await output.line(`${name}: ${digest}${replaced === undefined ? '' : `, was ${replaced}`}`);
      });
  },
};
