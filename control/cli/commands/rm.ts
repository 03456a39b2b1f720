/** `dsec rm`: takes names away, and with them the blobs that no other image needs. */
import { humanSize } from '#base';
import { type BlobStore, type RemovedImage, removeImage } from '#imagesvc';
import { blobsInUse } from '../../blobs-in-use.ts';
import { usersOfImage } from '../../image-users.ts';
import type { CommandDefinition } from '../command.ts';
import { counted } from '../counted.ts';
import { reportOf } from '../report-error.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Removes names from the store, and deletes the blobs that no other image needs. What another process is working with stays, and so does what is ' +
    'mounted, what a kept sandbox ran on or what a disk of this machine lies on: then it says by whom, and `dsec gc` deletes it when it is no longer used. ' +
    'Names that are not there fail the command; the other ones are removed all the same.',
  examples: [
    { line: 'dsec rm web:1 web:2', what: 'two images' },
    { line: 'dsec rm --dry-run web:1', what: 'what would be freed' },
  ],
  json: 'an array: `name`, `digest`, `deleted` (digests), `freedBytes`, `kept` (how many blobs stay), `traces` (how many went with it), `keptFor` (who uses them), `problem`',
  configure(command, { output }) {
    withJson(withStore(command))
      .argument('<images...>', 'names')
      .option('-n, --dry-run', 'only say what would be deleted')
      .action(async (names: string[], options: StoreOption & JsonOption & { dryRun?: boolean }) => {
        const store = await openChosenStore(options);
        const inUse = await blobsInUse(store);
        const removed: (RemovedImage & { readonly keptFor: readonly string[] })[] = [];
        let failure: unknown;
        for (const name of names) {
          try {
            // Asked before: afterwards the manifest may be gone.
            const users = await usersOf(store, name);
            const result = await removeImage(store, name, { dryRun: options.dryRun ?? false, inUse });
            const keptFor = result.kept === 0 ? [] : users;
            removed.push({ ...result, keptFor });
            if (options.json) continue;
            const freed = `${counted(result.deleted.length, 'blob')}, ${humanSize(result.freedBytes)}`;
            await output.line(
              options.dryRun ? `${result.name}: would free ${freed}` : `${result.name}: removed, freed ${freed}`,
            );
            if (result.kept > 0) {
              const why = keptFor.length > 0 ? keptFor.join('; ') : 'a command at work may need them';
              await output.line(`${result.name}: kept ${counted(result.kept, 'blob')}: ${why}`);
            }
            if (result.problem !== undefined)
              output.note(`${result.name}: blobs were left for a later collection: ${result.problem}`);
          } catch (error) {
            if (failure !== undefined) output.note(`dsec: ${reportOf(error).message}`);
            failure ??= error;
          }
        }
        if (options.json) await output.json(removed);
        if (failure !== undefined) throw failure;
      });
  },
};

/** A name that is not there, or a damaged one, has none; removing it says what is wrong. */
async function usersOf(store: BlobStore, name: string): Promise<string[]> {
  const ref = await store.getRef(name).catch(() => undefined);
  return ref === undefined ? [] : usersOfImage(store, ref.manifest.digest);
}
