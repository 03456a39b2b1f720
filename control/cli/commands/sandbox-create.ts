/** `dsec sandbox create` and `run`: sandboxes that stay, and one for a single command. */
import type { Command } from 'commander';
import { isDsecError } from '#base';
import {
  IDLE_ACTIONS,
  type IdleAction,
  RUNTIME_NAMES,
  type RuntimeName,
  SANDBOX_BACKENDS,
  type SandboxBackend,
  SERVICE_CLASSES,
} from '#runtime';
import { fail } from '../../errors.ts';
import { choice } from '../choice.ts';
import { runsWordsAfter } from '../command-words.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { type LimitOptions, limitsOf, withLimitOptions } from '../limit-options.ts';
import { type MachineOptions, machineOf, withMachineOptions } from '../machine-options.ts';
import { type NetworkOptions, networkOf, withNetworkOptions } from '../network-options.ts';
import { repeated } from '../repeated.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { USERNS_HELP, usernsOf } from '../sandbox-options.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';
import { variables } from '../variables.ts';
import { type VmMemoryOption, vmMemoryOf, withVmMemoryOption } from '../vm-memory-option.ts';
import { execIn } from './sandbox-resident.ts';

const OWN = 'dsec';
/** One whose `dsec sandbox run` was killed ends so long after its command. */
const RUN_IDLE_MS = 300_000;

interface CreateCommand extends StoreOption, LimitOptions, NetworkOptions, MachineOptions, VmMemoryOption {
  readonly workspace?: string;
  readonly toolkit?: string[];
  readonly name?: string;
  readonly env?: string[];
  readonly user?: string;
  readonly workdir?: string;
  readonly ttl?: string;
  readonly idle?: string;
  readonly idleAction?: string;
  readonly class: string;
  readonly userns?: string;
  readonly backend: string;
  readonly dockerDisk?: string;
  readonly runtime: string;
  readonly requestId?: string;
  readonly lazy?: boolean;
  readonly prefetch: boolean;
  readonly project?: string;
  readonly job?: string;
  readonly label?: string[];
  readonly alone?: boolean;
  readonly gpus?: string;
  readonly gpuKind?: string;
}

export function addCreate(command: Command, context: Context): void {
  const { output } = context;
  const create = withExamples(
    command
      .command('create')
      .description(
        'Makes a sandbox that stays and waits for commands; what the image would run is not run. It lives until it is stopped or its time is up, ' +
          'also when the runtime service ends and starts again. Its network is loopback alone unless options open it. Prints its name. Needs `dsec serve runtime`, or a cluster.',
      ),
    [
      { line: 'dsec sandbox create alpine:3.20 --name work', what: 'one to work in' },
      {
        line: 'dsec sandbox create base:1 --workspace repo:1 --toolkit node:20 --memory 2GiB --ttl 1h',
        what: 'composed of three images, with limits',
      },
      {
        line: 'dsec sandbox create desktop:1 --backend vm --name desk',
        what: 'a whole machine, from an image of a disk',
      },
      {
        line: 'dsec sandbox create base:1 --allow @pypi --allow git.corp:443',
        what: 'that reaches these and nothing else',
      },
      { line: 'dsec sandbox create alpine:3.20 --backend microvm --memory 2GiB', what: 'with a kernel of its own' },
    ],
  );
  withCreateOptions(withJson(create)).action(async (image: string, options: CreateCommand & JsonOption) => {
    const client = sandboxClient(context);
    context.caller?.begin({ store: options.store, runtime: OWN });
    const created = await client.create(await createBody(image, options, 'dsec sandbox create', context));
    if (options.json) await output.json(created);
    else await output.line(created.name);
  });
}

export function addSandboxRun(command: Command, context: Context): void {
  const run = withExamples(
    command
      .command('run')
      .description(
        'Makes a sandbox, runs a command in it as `dsec sandbox exec` does, with the same exit status, and removes the sandbox. With --keep it stays; its name is then ' +
          'printed on stderr. Where a cluster is in force it runs there; `dsec run` always runs here, and needs no service.',
      )
      .usage('[options] <image> [--] <command...>'),
    [
      { line: 'dsec sandbox run alpine:3.20 -- echo hello', what: 'one command' },
      { line: 'dsec sandbox run alpine:3.20 --memory 1GiB -t -- sh', what: 'on this terminal' },
    ],
  );
  withCreateOptions(runsWordsAfter(1, run))
    .argument('<command...>', 'what to run; options behind its first word are its own')
    .option('-t, --tty', 'on this terminal')
    .option('-i, --interactive', 'pass standard input on; that is done without it too')
    .option('-n, --no-stdin', 'it finds its input at its end')
    .option('--timeout <time>', 'then the command is ended, with all that it has started')
    .option('--keep', 'leave the sandbox there')
    .action(async (image: string, args: string[], options: CreateCommand & RunCommand) => {
      const client = sandboxClient(context);
      const body = await createBody(image, options, 'dsec sandbox run', context);
      const { name } = await client.create(options.idle === undefined ? { ...body, idleMs: RUN_IDLE_MS } : body);
      if (options.keep) context.output.note(`dsec: sandbox ${name}`);
      else {
        context.defer(async () => {
          try {
            await client.remove(name, true);
          } catch (error) {
            if (!isDsecError(error, 'SANDBOX_GONE') && !isDsecError(error, 'RUNTIME_SANDBOX_NOT_FOUND')) throw error;
          }
        });
      }
      const { tty, stdin, timeout } = options;
      await execIn(name, args, { tty, stdin, timeout }, context);
    });
}

interface RunCommand {
  readonly tty?: boolean;
  readonly stdin: boolean;
  readonly timeout?: string;
  readonly keep?: boolean;
}

function withCreateOptions(command: Command): Command {
  return withVmMemoryOption(withMachineOptions(withNetworkOptions(withLimitOptions(withStore(command), ' (4096)'))))
    .argument('<image>', 'the base: name or digest')
    .option('--workspace <image>', 'an image of kind workspace, above the base')
    .option('--toolkit <image>', 'an image of kind toolkit, above that; may be given several times', repeated)
    .option('--name <name>', 'what it is called; a random name by default')
    .option('-e, --env <variable>', 'NAME=VALUE, or NAME to pass on what it is here, for all its commands', repeated)
    .option('-u, --user <user>', 'of its commands, unless they say otherwise: name, uid, name:group or uid:gid')
    .option('-w, --workdir <folder>', 'where its commands start')
    .option('--ttl <time>', 'it ends after so long, whatever runs in it, paused or not')
    .option(
      '--idle <time>',
      'when nobody has used it for so long: no request, and no command but those of exec --detach',
    )
    .option('--idle-action <what>', `what happens then: ${IDLE_ACTIONS.join(' or ')}`, 'stop')
    .option('--class <class>', 'ls, latency-sensitive, or be, best effort: it runs when no other wants to', 'ls')
    .option('--userns <mode>', USERNS_HELP)
    .option('--backend <name>', 'what it lives in: container, microvm or vm', 'container')
    .option('--docker-disk <size>', 'of a microvm: a disk of its own at /var/lib/docker')
    .option('--runtime <name>', 'of a container, what starts it: dsec, crun or runc', 'dsec')
    .option('--request-id <id>', 'asked for again with the same id, the same sandbox is the answer')
    .option('--lazy', 'fetch data when it is read, also from a store that is a folder')
    .option('--no-prefetch', 'do not fetch ahead what the traces of the images say that a start reads')
    .option('--project <project>', 'of a cluster: whose quota it counts for (default: that of the token)')
    .option('--job <job>', 'of a cluster: sandboxes that belong together are spread over its nodes')
    .option('--label <label>', 'of a cluster: a node with this label; may be given several times', repeated)
    .option('--alone', 'of a cluster: on a node without sandboxes of other users')
    .option('--gpus <n>', 'of a cluster: graphics processors of its own')
    .option(
      '--gpu-kind <kind>',
      'of a cluster: of this kind, as `gpu:KIND` among the labels of `dsec nodes`; one unless --gpus says more',
    );
}

/** @throws CLI_USAGE, CLI_DURATION, CLI_SIZE, CLI_NOT_UTF8 */
async function createBody(image: string, options: CreateCommand, program: string, context: Context): Promise<object> {
  const { workspace, toolkit, name, user, workdir, ttl, requestId, lazy, prefetch } = options;
  const { project, job, label: labels, alone } = options;
  const { isRemote } = sandboxClient(context);
  const { gpus, gpuKind } = options;
  if (gpus !== undefined && !/^\d{1,2}$/.test(gpus)) {
    throw fail('CLI_USAGE', { problem: `--gpus ${gpus}: a number up to 64`, program });
  }
  if (!isRemote && [project, job, labels, alone, gpus, gpuKind].some((given) => given !== undefined)) {
    throw fail('CLI_USAGE', {
      problem: '--project, --job, --label, --alone, --gpus and --gpu-kind are for a cluster: name it with --api',
      program,
    });
  }
  return {
    // A cluster has a store of its own.
    store: isRemote ? options.store : (await openChosenStore(options)).url,
    image,
    workspace,
    toolkits: toolkit,
    name,
    env: variables(program, options.env, context),
    user,
    workdir,
    ttlMs: ttl === undefined ? undefined : parseDuration('--ttl', ttl),
    ...idleOf(options, program),
    class: choice('--class', options.class, SERVICE_CLASSES),
    userns: usernsOf(options),
    ...livesIn(options),
    ...limitsOf(options, program),
    network: networkOf(options, program),
    machine: machineOf(options, options.backend, program),
    memory: vmMemoryOf(options, options.backend, program),
    requestId,
    lazy,
    prefetch,
    project,
    job,
    labels,
    alone,
    gpus: gpus === undefined ? undefined : Number(gpus),
    gpuKind,
  };
}

/** @throws CLI_USAGE */
function livesIn(options: CreateCommand): {
  backend?: SandboxBackend;
  runtime?: RuntimeName;
  dockerDiskBytes?: number;
} {
  const backend = choice('--backend', options.backend, SANDBOX_BACKENDS);
  const runtime = choice('--runtime', options.runtime, RUNTIME_NAMES);
  const { dockerDisk } = options;
  if (dockerDisk !== undefined && backend !== 'microvm') {
    throw fail('CLI_USAGE', { problem: '--docker-disk is for --backend microvm', program: 'dsec sandbox create' });
  }
  const dockerDiskBytes = dockerDisk === undefined ? undefined : parseSize('--docker-disk', dockerDisk);
  return backend === 'container' ? { runtime } : { backend, dockerDiskBytes };
}

/** @throws CLI_USAGE, CLI_DURATION */
function idleOf({ idle, idleAction }: CreateCommand, program: string): { idleMs?: number; idleAction?: IdleAction } {
  const action = choice('--idle-action', idleAction, IDLE_ACTIONS);
  if (idle === undefined) return {};
  const idleMs = parseDuration('--idle', idle);
  if (idleMs < 1000) throw fail('CLI_USAGE', { problem: `--idle ${idle}: at least 1s`, program });
  return { idleMs, idleAction: action };
}
