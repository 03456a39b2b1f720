/** `dsec sandbox`: the sandboxes of this machine that run or were kept. */
import {
  forceRemoveSandbox,
  listSandboxes,
  reclaimSandboxes,
  reclaimTraces,
  removeSandbox,
  type StopResult,
  stopSandbox,
} from '#runtime';
import { fail } from '../../errors.ts';
import { backendView } from '../../runtime-service/backend-view.ts';
import type { SandboxClient } from '../../runtime-service/sandbox-client.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { eachNamed } from '../each-named.ts';
import { withExamples } from '../examples.ts';
import { sandboxClient, withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { addLimitCommands } from './sandbox-limits.ts';
import { addNetworkCommand } from './sandbox-network.ts';
import { addPort } from './sandbox-port.ts';
import { addResidentCommands, residentParts } from './sandbox-resident.ts';
import { addScreenCommands } from './sandbox-screen.ts';
import { addWatch } from './sandbox-watch.ts';

export const definition: CommandDefinition = {
  description:
    'Makes sandboxes that stay and runs commands in them, with `dsec serve runtime`; lists, stops and removes those and the sandboxes of `dsec run` ' +
    'that run now or were kept with --keep. Listing as root first ends what killed processes have left.',
  examples: [
    { line: 'dsec sandbox create alpine:3.20 --name work', what: 'one that stays' },
    { line: "dsec sandbox exec work -- sh -c 'echo hello'", what: 'a command in it' },
    { line: 'dsec sandbox ls', what: 'what there is' },
    { line: 'dsec sandbox stop work', what: 'end a running one; with --keep its changes stay' },
    { line: 'dsec sandbox rm work', what: 'a kept one and its changes' },
  ],
  json: 'ls: an array: `name`, `id`, `state`, `keep`, `createdAt`, `backend` (container, microvm or vm), `runtime` (of a container: dsec, crun or runc), `store`, `base`, `workspace`, `toolkits`, `exitCode`, `resident`, `end`, `pool` (of a container of FnCall); create: an object: `name`, `id`, `state`, `expiresAt` and more; port: an array: `address`, `port`, `inside`; screen: an object: `file`, `width`, `height`, `sizeBytes`; type, key, mouse: an object: `name`, `actions`; clipboard: an object: `name`, `selection`, `type`, `sizeBytes`, `file`, `text`; watch: an object a line: `event`, `path`, `directory`, `cookie`; logs: an array: `id`, `args`, `startedMs`, `running`, `result`; exec: an object: `id`, `exitCode`, `signal`, `timedOut`, `outOfMemory`, `stdoutBytes`, `stderrBytes`, `durationMs`; update: an object for each: `name`, `limits`; stats: an array: `name`, `cpuPercent`, `cpuUsec`, `throttledUsec`, `memory`, `pids`, `io`, `disk`, `limits`, `atMs`; rm: an object: `removed`',
  parts: Object.fromEntries(
    Object.entries(residentParts).map(([name, add]) => [
      name,
      (command, context) => {
        add(command, context);
        withApi(command, context);
      },
    ]),
  ),
  configure(command, context) {
    const { output } = context;
    addResidentCommands(command, context);
    addLimitCommands(command, context);
    addNetworkCommand(command, context);
    addPort(command, context);
    addWatch(command, context);
    addScreenCommands(command, context);
    const ls = withExamples(command.command('ls').description('Lists sandboxes that run or were kept.'), [
      { line: 'dsec sandbox ls', what: 'what there is' },
      { line: 'dsec sandbox ls --limit 100', what: 'of a cluster: the first hundred' },
      { line: 'dsec sandbox ls --json | jq -r \'.[] | select(.state == "kept") | .name\'', what: 'names of kept ones' },
    ]);
    ls.option('--limit <n>', 'of a cluster: so many, and how to go on from there (default: all)').option(
      '--continue <token>',
      'of a cluster: what comes after those of --limit before',
    );
    withJson(ls).action(async (options: ListOptions) => {
      const limit = options.limit === undefined ? undefined : Number(options.limit);
      if (limit !== undefined && !(Number.isInteger(limit) && limit >= 1 && limit <= 10_000)) {
        throw fail('CLI_USAGE', { problem: '--limit: a number from 1 to 10000', program: 'dsec sandbox ls' });
      }
      const client = sandboxClient(context);
      if (client.isRemote) return listRemote(client, options, context);
      if (limit !== undefined || options.continue !== undefined) {
        throw fail('CLI_USAGE', { problem: '--limit and --continue are for a cluster’s', program: 'dsec sandbox ls' });
      }
      const reclaimed = process.geteuid?.() === 0 ? await reclaimSandboxes() : undefined;
      for (const problem of [...(reclaimed?.problems ?? []), ...(await reclaimTraces())]) output.note(problem);
      const sandboxes = listSandboxes();
      if (options.json) return output.json(sandboxes.map((one) => ({ ...one, ...backendView(one) })));
      if (sandboxes.length === 0) return output.note('no sandboxes run or are kept');
      await output.table(
        [
          { title: 'NAME' },
          { title: 'STATE' },
          { title: 'BASE' },
          { title: 'WORKSPACE' },
          { title: 'TOOLKITS' },
          { title: 'SINCE' },
        ],
        sandboxes.map(({ name, state, base, workspace, toolkits, createdAt, end, resident, pool }) => [
          name,
          pool === undefined ? stateText(state, end?.reason, resident?.pausedAt) : `${state} (pool ${pool})`,
          base.name,
          workspace?.name ?? '',
          toolkits.map((toolkit) => toolkit.name).join(' '),
          createdAt,
        ]),
      );
    });
    const stop = withExamples(
      command
        .command('stop')
        .description(
          'Ends running sandboxes: SIGTERM to the command, which ends it at once unless it has a handler (exit status 143), then SIGKILL (137) ' +
            'when it has not ended in time. Changes stay where it was run with --keep. One that has ended already is no error.',
        ),
      [
        { line: 'dsec sandbox stop work', what: 'one, within ten seconds' },
        { line: 'dsec sandbox stop work1 work2 --time 1m', what: 'several, each within a minute' },
      ],
    );
    withJson(stop)
      .argument('<names...>', 'as `dsec sandbox ls` shows them')
      .option('--time <time>', 'from SIGTERM to SIGKILL: seconds, or a time as 500ms, 1m; 0: SIGKILL at once', '10s')
      .action(async (names: string[], options: JsonOption & { readonly time: string }) => {
        const { time } = options;
        const timeMs = parseDuration('--time', /^\d+$/.test(time) ? `${time}s` : time);
        const client = sandboxClient(context);
        const stop = async (named: string) => {
          const name = await client.wholeId(named, 'else');
          const resident = client.isRemote ? undefined : residentNamed(name);
          if (client.isRemote || resident !== undefined) {
            const end = await client.stop(name, timeMs);
            if (options.json) await output.json({ name, ...end });
            else await output.line(`${name}: ${end.detail}; ${whatStays(name, resident)}`);
            return;
          }
          const stopped = await stopSandbox(name, { timeMs });
          if (options.json) await output.json(stopped);
          else await output.line(`${name}: ${stopText(stopped)}`);
        };
        await eachNamed(names, stop, context, options);
      });
    const rm = withExamples(
      command.command('rm').description('Removes sandboxes that have ended, and their changes.'),
      [
        { line: 'dsec sandbox rm work', what: 'one' },
        { line: 'dsec sandbox rm work1 work2', what: 'several' },
        { line: 'dsec sandbox rm --force work', what: 'one that still runs: it is killed' },
      ],
    );
    withJson(rm)
      .argument('<names...>', 'as `dsec sandbox ls` shows them')
      .option('-f, --force', 'those that run too: ended with SIGKILL')
      .action(async (names: string[], options: JsonOption & { readonly force?: boolean }) => {
        const client = sandboxClient(context);
        const removed: string[] = [];
        const remove = async (named: string) => {
          // Names of those that have ended may be taken again: what is meant has to be said.
          const name = await client.wholeId(named, 'also');
          if (client.isRemote || (options.force === true && residentNamed(name) !== undefined))
            await client.remove(name, options.force ?? false);
          else await (options.force === true ? forceRemoveSandbox(name) : removeSandbox(name));
          removed.push(name);
          if (!options.json) await output.line(`${name}: removed`);
        };
        await eachNamed(names, remove, context, options);
        if (options.json) await output.json({ removed });
      });
    withApi(command, context);
  },
};

interface ListOptions extends JsonOption {
  readonly limit?: string;
  readonly continue?: string;
}

async function listRemote(client: SandboxClient, options: ListOptions, { output }: Context): Promise<void> {
  const { json, limit } = options;
  const listed = await client.listing({ limit, continue: options.continue });
  const { sandboxes, unreachable } = listed;
  if (listed.continue !== undefined)
    output.note(`dsec: there are more: --limit ${limit} --continue ${listed.continue}`);
  if (unreachable.length > 0) output.note(`dsec: ${unreachable.join(', ')}: no answer; what is there is not listed`);
  if (json) return output.json(sandboxes);
  if (sandboxes.length === 0) return output.note('no sandboxes run');
  const text = (value: unknown) => (typeof value === 'string' ? value : '');
  await output.table(
    [{ title: 'NAME' }, { title: 'STATE' }, { title: 'PROJECT' }, { title: 'USER' }, { title: 'SINCE' }],
    sandboxes.map(({ name, state, project, user, createdAt }) => [
      name,
      text(state),
      text(project),
      text(user),
      text(createdAt),
    ]),
  );
}

type Listed = ReturnType<typeof listSandboxes>[number];

/** It runs, and the runtime service is the one to end it. */
function residentNamed(name: string): Listed | undefined {
  const found = listSandboxes().find((record) => record.name === name);
  return found?.state === 'running' && found.resident !== undefined ? found : undefined;
}

/** Of a cluster's, `resident` is undefined. Changes of a whole machine are on its disk, and cannot be packed. */
function whatStays(name: string, resident: Listed | undefined): string {
  if (resident === undefined) return `dsec sandbox rm ${name} removes what it changed`;
  if (resident.machine !== undefined) return `its disk stays until dsec sandbox rm ${name}`;
  return `its changes stay: dsec pack-diff ${name}, or dsec sandbox rm ${name}`;
}

function stopText({ name, was, killed, kept }: StopResult): string {
  if (was === 'not-running') return 'had ended already';
  const how = killed ? 'killed' : 'stopped';
  return kept ? `${how}; kept: dsec pack-diff ${name}, or dsec sandbox rm ${name}` : how;
}

function stateText(state: 'running' | 'kept', reason: string | undefined, pausedAt: string | undefined): string {
  if (reason !== undefined) return `${state} (${reason})`;
  return state === 'running' && pausedAt !== undefined ? 'paused' : state;
}
