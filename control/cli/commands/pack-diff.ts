/** `dsec pack-diff`: an image of what a sandbox changed. */
import { humanSize, isDsecError } from '#base';
import { CODEC_NAMES, type CodecName } from '#converter';
import { listSandboxes, removeSandbox } from '#runtime';
import { fail } from '../../errors.ts';
import { PACK_KINDS, type PackedView, packedView, packSandbox } from '../../pack-sandbox.ts';
import { SandboxClient } from '../../runtime-service/sandbox-client.ts';
import { choice } from '../choice.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { counted } from '../counted.ts';
import { repeated } from '../repeated.ts';
import { endpointOf } from '../sandbox-client-of.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

/** Paths left out by patterns that people see named. */
const SKIPPED_NAMED = 5;

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
    'Makes one EROFS layer of everything a sandbox changed (deleted files, replaced folders, attributes, hard links and extended attributes ' +
    'too) and publishes it as an image on top of what the sandbox ran on. That layer alone is the image’s own: the layers of a workspace and of ' +
    'toolkits that the sandbox was composed of lie below it and do not come along when it is laid over another base. Build residue (package caches, ' +
    'histories, /tmp) is left out unless --no-policy is given; docs/pack-diff.md has the list. Sockets and pipes are left out with a note. A sandbox of `dsec run` has to have ended (--keep). One of ' +
    '`dsec sandbox create` may run or be paused: its commands stand still while its changes are read, and files that are open for writing are told.',
  examples: [
    { line: 'dsec pack-diff work --name web:2', what: 'everything but build residue' },
    {
      line: "dsec pack-diff work --name tools:1 --kind toolkit --exclude '*.log' --rm",
      what: 'as a toolkit, without logs; the kept sandbox goes',
    },
  ],
  json: 'an object: `name`, `digest`, `kind`, `layers` (how many), `stats`, `notes`, `skipped` (paths that patterns left out), `metaBytes`, `dataBytes`, `sizeBytes`',
  exactPaths: { options: ['exclude'] },
  configure(command, context) {
    const { output, progress, signal } = context;
    withJson(withStore(command))
      .argument('<sandbox>', 'as `dsec sandbox ls` shows it')
      .requiredOption('--name <name:tag>', 'of the new image')
      .option('--kind <kind>', `what it is meant for: ${PACK_KINDS.join(', ')}`, 'snapshot')
      .option('--exclude <pattern>', 'leave out more, patterns as in .gitignore; may be given several times', repeated)
      .option('--no-policy', 'pack build residue too')
      .option('--compress <codec>', `compress file data: ${CODEC_NAMES.join(', ')}`)
      .option('--rm', 'remove the sandbox and its changes afterwards')
      .action(async (sandbox: string, options: Options) => {
        const request = {
          name: options.name,
          store: options.store,
          kind: choice('--kind', options.kind, PACK_KINDS),
          exclude: options.exclude,
          policy: options.policy,
          compress: choice<CodecName>('--compress', options.compress, CODEC_NAMES),
        };
        refuseOfCluster(sandbox, context);
        let packed: PackedView;
        if (isRunningResident(sandbox)) {
          if (options.rm) {
            const problem = `--rm: ${sandbox} is running; stop it first, or leave --rm out`;
            throw fail('CLI_USAGE', { problem, program: 'dsec pack-diff' });
          }
          const store = request.store === undefined ? undefined : (await openChosenStore(options)).url;
          packed = await new SandboxClient().packDiff(sandbox, { ...request, store }, signal);
        } else packed = packedView(await packSandbox({ sandbox, ...request, progress, signal }));
        if (options.rm) await removeSandbox(sandbox);
        const { name, digest, stats, notes, skipped, composition } = packed;
        for (const note of notes) output.note(`${sandbox}: ${note}`);
        const others = [composition.workspace, ...composition.toolkits].filter((part) => part !== undefined);
        if (options.json) return output.json(packed);
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

/** This command is for sandboxes of this machine, whatever context is current; its namesake below `sandbox` is for a cluster's. @throws SANDBOX_ELSEWHERE */
function refuseOfCluster(sandbox: string, context: Context): void {
  if (listSandboxes().some(({ name }) => name === sandbox)) return;
  const currentContext = currentContextOf(context);
  if (currentContext !== undefined) throw fail('SANDBOX_ELSEWHERE', { name: sandbox, context: currentContext });
}

/** One that cannot be read changes nothing for what is on this machine. */
function currentContextOf(context: Context): string | undefined {
  try {
    return endpointOf(context)?.currentContext;
  } catch (error) {
    if (isDsecError(error)) return undefined;
    throw error;
  }
}

/** The runtime service has it. */
function isRunningResident(name: string): boolean {
  return listSandboxes().some(
    (record) => record.name === name && record.state === 'running' && record.resident !== undefined,
  );
}
