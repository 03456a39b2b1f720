/** `dsec mounts`: what is mounted on this machine. */
import { listMounts } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Lists the images that are mounted on this machine, by `dsec mount` and by running containers. As root it first puts right what ' +
    'crashed processes have left.',
  examples: [
    { line: 'dsec mounts', what: 'all of them' },
    { line: "dsec mounts --json | jq -r '.[].target'", what: 'only their folders' },
  ],
  configure(command, { output }) {
    withJson(command).action(async (options: JsonOption) => {
      const mounts = await listMounts();
      if (options.json) return output.json(mounts);
      if (mounts.length === 0) return output.note('nothing is mounted');
      await output.table(
        [
          { title: 'ID' },
          { title: 'IMAGE' },
          { title: 'LAYERS', right: true },
          { title: 'SINCE' },
          { title: 'TARGET' },
          { title: 'CHANGES' },
        ],
        mounts.map(({ id, image, layers, createdAt, target, upper }) => [
          id,
          image?.name ?? '',
          String(layers.length),
          createdAt,
          target,
          upper ?? '',
        ]),
      );
    });
  },
};
