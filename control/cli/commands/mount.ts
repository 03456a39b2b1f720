/** `dsec mount`: an image as a folder, through the kernel. */
import { resolve } from 'node:path';
import { blobFilesFor, mountImage, openImage, reclaimDataServers } from '#imagesvc';
import { reclaimTraces } from '#runtime';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly rw?: string;
  readonly lazy?: boolean;
  readonly prefetch: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Mounts an image on an existing folder: each EROFS layer once per machine, shared by all its mounts, OverlayFS on top. Every data ' +
    'file is proved to be the blob its layer names before the kernel sees it. Read-only, unless --rw names a folder for the changes. ' +
    'From a store that is no folder, or with --lazy, the mount is there at once and data is fetched when it is read, verified, and kept in ' +
    'the cache; a data server in the background does that, and ends when nothing has used it for a while. ' +
    'Where the kernel has no EROFS, our reader behind FUSE shows the layers. ' +
    'Needs root. The mount stays until `dsec umount`; what a crash leaves half done, the next command puts right.',
  examples: [
    { line: 'dsec mount web:1 /mnt', what: 'read-only' },
    { line: 'dsec mount --store s3://images/dsec web:1 /mnt', what: 'lazily' },
    { line: 'dsec mount web:1 /mnt --rw /var/tmp/web-changes', what: 'writable; changes go to the named folder' },
  ],
  json: 'an object: `id`, `target`, `layers` (digests), `upper`, `work`, `image`, `digest`',
  exactPaths: { arguments: true },
  configure(command, { output }) {
    withJson(withStore(command))
      .argument('<image>', 'name or digest')
      .argument('<target>', 'an existing folder')
      .option('--rw <folder>', 'make the mount writable; changes go to this folder, which is made when it is missing')
      .option('--lazy', 'fetch data when it is read, also from a store that is a folder')
      .option('--no-prefetch', 'do not fetch ahead what the traces of the image say that a start reads')
      .action(async (name: string, target: string, options: Options) => {
        await reclaimDataServers();
        for (const problem of await reclaimTraces()) output.note(`dsec: ${problem}`);
        const store = await openChosenStore(options);
        const image = await openImage(store, name);
        const upper = options.rw === undefined ? undefined : resolve(options.rw);
        const files = blobFilesFor({
          store,
          lazy: options.lazy,
          prefetch: options.prefetch ? [image] : [],
          onTraceProblem: (text) => output.note(`dsec: ${text}`),
        });
        const mounted = await mountImage({ files, image, target, upper });
        await files.handedOver?.();
        if (options.json) return output.json({ ...mounted, image: image.name, digest: image.manifestDigest });
        const count = mounted.layers.length;
        await output.line(
          `${image.name} on ${mounted.target} (${count} layer${count === 1 ? '' : 's'}${upper === undefined ? '' : `, changes in ${upper}`})`,
        );
      });
  },
};
