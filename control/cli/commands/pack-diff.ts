/** `dsec pack-diff`: an image of what a sandbox changed. */
import { humanSize } from '#base';
import { CODEC_NAMES, type CodecName } from '#converter';
import { sizesOf } from '#imagesvc';
import { removeSandbox } from '#runtime';
import { packSandbox } from '../../pack-sandbox.ts';
import { choice } from '../choice.ts';
import type { CommandDefinition } from '../command.ts';
import { counted } from '../counted.ts';
import { repeated } from '../repeated.ts';
import { type JsonOption, type StoreOption, withJson, withStore } from '../store-option.ts';

/** Paths left out by patterns that people see named. */
const SKIPPED_NAMED = 5;
const KINDS = ['snapshot', 'workspace', 'toolkit'] as const;

interface Options extends StoreOption, JsonOption {
  readonly name: string;
  readonly kind?: string;
  readonly exclude?: string[];
  readonly policy: boolean;
  readonly compress?: string;
  readonly rm?: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Makes one EROFS layer of everything a kept sandbox changed (deleted files, replaced folders, attributes, hard links and extended attributes ' +
    'too) and publishes it as an image on top of what the sandbox ran on. That layer alone is the image’s own: the layers of a workspace and of ' +
    'toolkits that the sandbox was composed of lie below it and do not come along when it is laid over another base. Build residue (package caches, ' +
    'histories, /tmp) is left out unless --no-policy is given; docs/pack-diff.md has the list. Sockets and pipes are left out with a note.',
  examples: [
    { line: 'dsec pack-diff work --name web:2', what: 'everything but build residue' },
    {
      line: "dsec pack-diff work --name tools:1 --kind toolkit --exclude '*.log' --rm",
      what: 'as a toolkit, without logs; the sandbox goes',
    },
  ],
  json: 'an object: `name`, `digest`, `kind`, `layers` (how many), `stats`, `notes`, `skipped` (paths that patterns left out), `metaBytes`, `dataBytes`, `sizeBytes`',
  exactPaths: { options: ['exclude'] },
  configure(command, { output, progress, signal }) {
    withJson(withStore(command))
      .argument('<sandbox>', 'the name it was run and kept under')
      .requiredOption('--name <name:tag>', 'of the new image')
      .option('--kind <kind>', `what it is meant for: ${KINDS.join(', ')}`, 'snapshot')
      .option('--exclude <pattern>', 'leave out more, patterns as in .gitignore; may be given several times', repeated)
      .option('--no-policy', 'pack build residue too')
      .option('--compress <codec>', `compress file data: ${CODEC_NAMES.join(', ')}`)
      .option('--rm', 'remove the sandbox and its changes afterwards')
      .action(async (sandbox: string, options: Options) => {
        const packed = await packSandbox({
          sandbox,
          name: options.name,
          store: options.store,
          kind: choice('--kind', options.kind, KINDS),
          exclude: options.exclude,
          policy: options.policy,
          compress: choice<CodecName>('--compress', options.compress, CODEC_NAMES),
          progress,
          signal,
        });
        if (options.rm) await removeSandbox(sandbox);
        for (const note of packed.notes) output.note(`${sandbox}: ${note}`);
        const { name, digest, image, stats, notes, skipped, composition } = packed;
        const others = [composition.workspace, ...composition.toolkits].filter((part) => part !== undefined);
        if (options.json)
          return output.json({
            name,
            digest,
            kind: image.kind,
            layers: image.layers.length,
            ownLayers: image.ownLayers,
            composition,
            stats,
            notes,
            skipped,
            ...sizesOf(image),
          });
        await output.line(`${name}: ${digest}`);
        await output.line(
          `${counted(stats.inodes, 'inode')}, ${humanSize(stats.fileBytes)} in files; new: ${humanSize(stats.metadataBytes)} metadata, ${humanSize(stats.dataBytes)} data`,
        );
        if (others.length > 0) {
          const names = others.map((part) => part.name).join(', ');
          await output.line(`its own layer holds the changes alone; below it, and not its own: ${names}`);
        }
        if (skipped.length === 0) return;
        const named = skipped.slice(0, SKIPPED_NAMED).join(', ');
        const more =
          skipped.length > SKIPPED_NAMED ? ` and ${skipped.length - SKIPPED_NAMED} more (--json lists them)` : '';
        await output.line(`left out by patterns: ${named}${more}`);
      });
  },
};
