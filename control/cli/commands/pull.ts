/** `dsec pull`: a converted image, from where another machine pushed it. */
import { humanSize } from '#base';
import { pullImage } from '#imagesvc';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { counted } from '../counted.ts';
import { nameFromSource } from '../name-from-source.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';
import { type TracesOption, type TransferOption, withTraces, withTransfer } from '../transfer-option.ts';

export const definition: CommandDefinition = {
  description:
    'Fetches an image that `dsec push` sent: from a registry (docker://), an OCI layout (oci:) or an archive of one (oci-archive:). Every blob ' +
    'is verified, and published only when all have arrived; traces of its starts come along. Ordinary images are converted with `dsec convert` instead. Registries on loopback may be ' +
    'plain HTTP without --insecure.',
  examples: [
    { line: 'dsec pull docker://registry.example/team/web:1', what: 'as web:1' },
    { line: 'dsec pull oci:/srv/images:web --name web:2', what: 'from an OCI layout, under another name' },
  ],
  json: 'an object: `name`, `digest`, `source`, `fetchedBlobs`, `fetchedBytes`, `skippedBlobs`, `fetchedTraces`',
  configure(command, { output, progress, signal }) {
    withJson(withTraces(withTransfer(withStore(command))))
      .argument('<source>', 'docker://REGISTRY/REPOSITORY:TAG, oci:FOLDER:TAG or oci-archive:FILE:TAG')
      .option('--name <name>', 'what it is called in the store (default: repository and tag of the source)')
      .action(
        async (
          source: string,
          options: StoreOption & TransferOption & TracesOption & JsonOption & { name?: string },
        ) => {
          const name = options.name ?? nameFromSource(source);
          if (name === undefined)
            throw fail('CLI_USAGE', { problem: `${source} gives no name; add --name`, program: 'dsec pull' });
          const { creds: credentials, insecure, traces } = options;
          const store = await openChosenStore(options);
          const { image, ...pulled } = await pullImage(store, source, name, {
            credentials,
            insecure,
            traces,
            onTraceProblem: (text) => output.note(`dsec: ${text}`),
            progress,
            signal,
          });
          if (options.json) return output.json({ name: image.name, digest: image.manifestDigest, ...pulled });
          await output.line(
            `${image.name}: ${image.manifestDigest}, fetched ${counted(pulled.fetchedBlobs, 'blob')} (${humanSize(pulled.fetchedBytes)}), ${pulled.skippedBlobs} were there${pulled.fetchedTraces > 0 ? `; with ${counted(pulled.fetchedTraces, 'trace')}` : ''}`,
          );
        },
      );
  },
};
