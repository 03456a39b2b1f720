/** Options of commands that run something in a sandbox (`run`, `trace`): what it is composed of, and what runs in it how. */
import type { Command } from 'commander';
import { type BlobStore, type Image, openImage } from '#imagesvc';
import { RUNTIME_NAMES, type RunOptions, USERNS_MODES, type UsernsMode } from '#runtime';
import { choice } from './choice.ts';
import type { Context } from './context.ts';
import { refuseInexactVariables } from './exact-text.ts';
import { repeated } from './repeated.ts';

export interface SandboxOptions {
  readonly workspace?: string;
  readonly toolkit?: string[];
  readonly env?: string[];
  readonly user?: string;
  readonly workdir?: string;
  readonly entrypoint?: string;
  readonly tty?: boolean;
  readonly network?: string;
  readonly runtime?: string;
  readonly userns?: string;
}

export const USERNS_HELP =
  "private: its root user is nobody on this machine; host: it is root (default: private where the kernel can, but not with the host's network)";

export function withSandboxOptions(command: Command): Command {
  return command
    .option('--workspace <image>', 'an image of kind workspace, above the base')
    .option('--toolkit <image>', 'an image of kind toolkit, above that; may be given several times', repeated)
    .option(
      '-e, --env <variable>',
      'NAME=VALUE, or NAME to pass on what it is here; may be given several times',
      repeated,
    )
    .option('-u, --user <user>', 'name, uid, name:group or uid:gid')
    .option('-w, --workdir <folder>', 'where the command starts')
    .option('--entrypoint <program>', "in place of the image's")
    .option('-t, --tty', 'give it this terminal')
    .option('--runtime <name>', 'what starts it: dsec, crun or runc (default: the first of them that is there)')
    .option('--userns <mode>', USERNS_HELP);
}

/** @throws CLI_USAGE, CATALOG_NOT_FOUND */
export async function sandboxOptionsOf(
  store: BlobStore,
  base: string,
  command: readonly string[],
  options: SandboxOptions,
  program: string,
  context: Context,
): Promise<RunOptions> {
  checkSandboxOptions(options, program);
  const workspace = options.workspace === undefined ? undefined : await openImage(store, options.workspace);
  noteKind(workspace, context);
  return {
    store,
    base: await openImage(store, base),
    workspace,
    toolkits: await Promise.all((options.toolkit ?? []).map((toolkit) => openImage(store, toolkit))),
    command,
    entrypoint: options.entrypoint === undefined ? undefined : [options.entrypoint],
    env: options.env,
    user: options.user,
    workdir: options.workdir,
    terminal: options.tty ?? false,
    network: options.network === 'host' ? 'host' : 'none',
    runtime: options.runtime,
    userns: usernsOf(options),
    caller: context.caller,
    backend: context.caller?.backend,
    signal: context.signal,
    takeSignals: context.takeSignals,
    onTraceProblem: (text) => context.output.note(`dsec: ${text}`),
  };
}

/** @throws CLI_USAGE */
export function usernsOf({ userns }: { readonly userns?: string }): UsernsMode | undefined {
  return userns === undefined ? undefined : choice('--userns', userns, USERNS_MODES);
}

/** What is wrong whatever the store holds. @throws CLI_USAGE */
export function checkSandboxOptions({ env, runtime, ...options }: SandboxOptions, program: string): void {
  usernsOf(options);
  choice('--runtime', runtime, RUNTIME_NAMES);
  // Those that are asked for by name; others never reach the sandbox.
  refuseInexactVariables(
    program,
    (env ?? []).filter((entry) => !entry.includes('=')),
  );
}

/** An image of another kind works too, but its files may lie elsewhere than meant, and all of its layers go above the base's. */
function noteKind(workspace: Image | undefined, context: Context): void {
  if (workspace === undefined || (workspace.kind !== 'base' && workspace.kind !== 'toolkit')) return;
  context.output.note(
    `dsec: --workspace ${workspace.name}: an image of kind ${workspace.kind}; a folder becomes a workspace with: ` +
      'dsec convert dir:FOLDER --prefix /workspace --name NAME:TAG --kind workspace',
  );
}
