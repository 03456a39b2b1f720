/** `dsec sandbox pack-diff`: an image of what a sandbox that runs or is paused has changed, here or in a cluster. */
import type { Command } from 'commander';
import { humanSize } from '#base';
import { CODEC_NAMES } from '#converter';
import { PACK_KINDS } from '../../pack-sandbox.ts';
import { choice } from '../choice.ts';
import type { Context } from '../context.ts';
import { counted } from '../counted.ts';
import { withExamples } from '../examples.ts';
import { repeated } from '../repeated.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface PackCommand extends JsonOption {
  readonly name: string;
  readonly kind: string;
  readonly exclude?: string[];
  readonly policy: boolean;
  readonly compress?: string;
}

export function addPackDiff(command: Command, context: Context): void {
  const pack = withExamples(
    command
      .command('pack-diff')
      .description(
        'Makes an image of what a sandbox has changed, as it is at one moment; it goes on. The image is in the store that the sandbox was made from. Of one that was kept and does not run: `dsec pack-diff`.',
      ),
    [{ line: 'dsec sandbox pack-diff work --name work-done:1', what: 'for others to start from' }],
  );
  withJson(pack)
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .requiredOption('--name <name:tag>', 'of the new image')
    .option('--kind <kind>', `what it is meant for: ${PACK_KINDS.join(', ')}`, 'snapshot')
    .option('--exclude <pattern>', 'leave out more, patterns as in .gitignore; may be given several times', repeated)
    .option('--no-policy', 'pack build residue too')
    .option('--compress <codec>', `compress file data: ${CODEC_NAMES.join(', ')}`)
    .action(async (sandbox: string, options: PackCommand) => {
      const { output, signal } = context;
      const packed = await sandboxClient(context).packDiff(
        sandbox,
        {
          name: options.name,
          kind: choice('--kind', options.kind, PACK_KINDS),
          exclude: options.exclude,
          policy: options.policy,
          compress: choice('--compress', options.compress, CODEC_NAMES),
        },
        signal,
      );
      for (const note of packed.notes) output.note(`${sandbox}: ${note}`);
      if (options.json) return output.json(packed);
      const { name, digest, stats } = packed;
      await output.line(`${name}: ${digest}`);
      await output.line(
        `${counted(stats.inodes, 'inode')}, ${humanSize(stats.fileBytes)} in files; new: ${humanSize(stats.metadataBytes)} metadata, ${humanSize(stats.dataBytes)} data`,
      );
    });
}
