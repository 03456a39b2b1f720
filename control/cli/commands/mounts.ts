/** `dsec mounts`: what is mounted on this machine. */
import { LAYERS, type LazyLayer, listMounts, reclaimDataServers } from '#imagesvc';
import { reclaimTraces } from '#runtime';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Lists the images that are mounted on this machine, by `dsec mount` and by running sandboxes. As root it first puts right what ' +
    'crashed processes have left: a data server that has died is named, and what read through it is unmounted.',
  examples: [
    { line: 'dsec mounts', what: 'all of them' },
    { line: "dsec mounts --json | jq -r '.[].target'", what: 'only their folders' },
  ],
  json: 'an array: `id`, `target`, `image`, `layers` (digests), `lazy`, `upper`, `work`, `owner`, `namespace`, `createdAt`, `state`, `mountId`, `device`',
  configure(command, { output }) {
    withJson(command).action(async (options: JsonOption) => {
      const { adopted, removed } = await reclaimDataServers();
      const named = (storeUrl: string) =>
        storeUrl === LAYERS ? 'the server of the EROFS reader' : `the data server of ${storeUrl}`;
      for (const { storeUrl } of adopted)
        output.note(`dsec: ${named(storeUrl)} had lost its supervisor and got a new one`);
      for (const { storeUrl, mounts } of removed) {
        output.note(
          `dsec: ${named(storeUrl)} was dead${mounts.length === 0 ? '' : `, and with it ${mounts.join(', ')}: unmounted`}`,
        );
      }
      for (const problem of await reclaimTraces()) output.note(`dsec: ${problem}`);
      const mounts = await listMounts();
      if (options.json) return output.json(mounts);
      if (mounts.length === 0) return output.note('nothing is mounted');
      await output.table(
        [
          { title: 'ID' },
          { title: 'IMAGE' },
          { title: 'LAYERS', right: true },
          { title: 'DATA' },
          { title: 'SINCE' },
          { title: 'TARGET' },
          { title: 'CHANGES' },
        ],
        mounts.map(({ id, image, layers, lazy, createdAt, target, upper }) => [
          id,
          image?.name ?? '',
          String(layers.length),
          dataOf(lazy ?? []),
          createdAt,
          target,
          upper ?? '',
        ]),
      );
    });
  },
};

/** Where data comes from; and that the kernel has no part in reading it. */
function dataOf(lazy: readonly LazyLayer[]): string {
  const where = lazy.some(({ served, reader }) => served && !reader) ? 'lazy' : 'local';
  return lazy.some(({ reader }) => reader) ? `${where}, reader` : where;
}
