/** `dsec push`: a converted image, to where other machines get it. */
import { humanSize } from '#base';
import { pushImage } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { counted } from '../counted.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';
import { type TracesOption, type TransferOption, withTraces, withTransfer } from '../transfer-option.ts';

export const definition: CommandDefinition = {
  description:
    'Sends a converted image, as it is in the store, to a registry (docker://), an OCI layout (oci:) or an archive of one (oci-archive:). ' +
    'Blobs that are there already are not sent again; every blob is verified while it is sent. Traces of its starts go along. Without a tag it is called latest there. Registries on ' +
    'loopback may be plain HTTP without --insecure.',
  examples: [
    { line: 'dsec push web:1 docker://registry.example/team/web:1', what: 'to a registry' },
    { line: 'dsec push web:1 docker://127.0.0.1:5000/web:1', what: 'to one on this machine, which may lack TLS' },
    { line: 'dsec push web:1 oci:/srv/images:web', what: 'to an OCI layout; other images in it stay' },
  ],
  json: 'an object: `destination`, `digest`, `sentBlobs`, `sentBytes`, `skippedBlobs`, `traces`',
  configure(command, { output, progress, signal }) {
    withJson(withTraces(withTransfer(withStore(command))))
      .argument('<image>', 'name or digest')
      .argument('<destination>', 'docker://REGISTRY/REPOSITORY:TAG, oci:FOLDER:TAG or oci-archive:FILE:TAG')
      .action(
        async (
          name: string,
          destination: string,
          options: StoreOption & TransferOption & TracesOption & JsonOption,
        ) => {
          const { creds: credentials, insecure, traces } = options;
          const store = await openChosenStore(options);
          const pushed = await pushImage(store, name, destination, {
            credentials,
            insecure,
            traces,
            onTraceProblem: (text) => output.note(`dsec: ${text}`),
            progress,
            signal,
          });
          if (options.json) return output.json(pushed);
          await output.line(
            `${pushed.destination}: ${pushed.digest}, sent ${counted(pushed.sentBlobs, 'blob')} (${humanSize(pushed.sentBytes)}), ${pushed.skippedBlobs} were there${pushed.traces > 0 ? `; with ${counted(pushed.traces, 'trace')}` : ''}`,
          );
        },
      );
  },
};
