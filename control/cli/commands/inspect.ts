/** `dsec inspect`: one image, its layers and its config. */
import { humanSize } from '#base';
import { inspectImage, type OciConfig } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { shortDigest } from '../digest-text.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Shows an image: its kind, its base, its EROFS layers (or those of a disk) with the blobs they consist of and the images they are shared with, and what its ' +
    'config says about running it. OF tells the layers that are the image’s own from the lower ones it was made on: those of its base and, of ' +
    'a composed sandbox, of workspace and toolkits. With --json also the whole config and manifest.',
  examples: [
    { line: 'dsec inspect web:1', what: 'layers and sizes' },
    { line: 'dsec inspect web:1 --json | jq .manifest', what: 'the manifest as it is stored' },
  ],
  json: 'an object: `name`, `digest`, `kind`, `base`, `ownLayers`, `metaBytes`, `dataBytes`, `sizeBytes`, `layers` (`meta`, `devices`, `own`, `sharedWith`), `disk` (of a disk: `sizeBytes`, `layers`: `digest`, `sizeBytes`, `chunkDigests`, `own`, `sharedWith`), `config`, `traces` (`name`, `digest`, `chunks`, `bytes`, `files`, `command`), `manifest`',
  configure(command, { output }) {
    withJson(withStore(command))
      .argument('<image>', 'name or digest')
      .action(async (name: string, options: StoreOption & JsonOption) => {
        const image = await inspectImage(await openChosenStore(options), name);
        if (options.json) return output.json(image);
        const { config } = image.config;
        const facts: [string, string | undefined][] = [
          ['name', image.name],
          ['digest', image.digest],
          ['kind', image.kind],
          ['base', image.base],
          ['platform', image.disk === undefined ? platformOf(image.config) : undefined],
          [
            'size',
            `${humanSize(image.sizeBytes)}: ${humanSize(image.metaBytes)} metadata, ${humanSize(image.dataBytes)} data`,
          ],
          ['device', image.disk?.sizeBytes === undefined ? undefined : humanSize(image.disk.sizeBytes)],
          ['entrypoint', commandText(config?.Entrypoint)],
          ['cmd', commandText(config?.Cmd)],
          ['user', config?.User],
          ['workdir', config?.WorkingDir],
        ];
        for (const [title, value] of facts) if (value) await output.line(`${title.padEnd(12)}${value}`);
        for (const variable of config?.Env ?? []) await output.line(`${'env'.padEnd(12)}${variable}`);
        for (const { name, chunks, bytes, files } of image.traces) {
          const what = bytes === undefined ? '' : `: ${chunks} chunks, ${humanSize(bytes)}, of ${files} files`;
          await output.line(`${'trace'.padEnd(12)}${name}${what}`);
        }
        await output.line();
        if (image.disk !== undefined) {
          await output.table(
            [
              { title: 'LAYER', right: true },
              { title: 'DATA', right: true },
              { title: 'OF' },
              { title: 'DIGEST' },
              { title: 'ALSO IN' },
            ],
            image.disk.layers.map(({ digest, sizeBytes, own, sharedWith }, i) => [
              String(i + 1),
              humanSize(sizeBytes),
              own ? 'image' : 'lower',
              shortDigest(digest),
              sharedWith.join(' '),
            ]),
          );
          return;
        }
        await output.table(
          [
            { title: 'LAYER', right: true },
            { title: 'METADATA', right: true },
            { title: 'DATA', right: true },
            { title: 'OF' },
            { title: 'DIGEST' },
            { title: 'ALSO IN' },
          ],
          image.layers.map(({ meta, devices, own, sharedWith }, i) => [
            String(i + 1),
            humanSize(meta.sizeBytes),
            humanSize(devices.reduce((total, device) => total + device.sizeBytes, 0)),
            own ? 'image' : 'lower',
            shortDigest(meta.digest),
            sharedWith.join(' '),
          ]),
        );
      });
  },
};

function platformOf({ os, architecture, variant }: OciConfig): string {
  return [os, architecture, variant].filter(Boolean).join('/');
}

function commandText(words: readonly string[] | null | undefined): string | undefined {
  return words?.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : JSON.stringify(word))).join(' ');
}
