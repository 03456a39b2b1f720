/** `dsec sandbox update` and `dsec sandbox stats`: limits of sandboxes that stay, and what they use. */
import { setTimeout as delay } from 'node:timers/promises';
import type { Command } from 'commander';
import { humanSize } from '#base';
import type { SandboxUsage } from '#runtime';
import { fail } from '../../errors.ts';
import type { SandboxClient } from '../../runtime-service/sandbox-client.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { type LimitOptions, limitChangesOf, limitNames, withLimitOptions } from '../limit-options.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export function addLimitCommands(command: Command, context: Context): void {
  addUpdate(command, context);
  addStats(command, context);
}

function addUpdate(command: Command, context: Context): void {
  const { output } = context;
  const program = 'dsec sandbox update';
  const update = withExamples(
    command
      .command('update')
      .description(
        'Changes limits of running sandboxes made by `dsec sandbox create`; `none` takes one away. What is not named stays. Memory cannot go below what is in ' +
          'use and cannot be given back. A disk limit has to be there from the creation; one that is an image (see `dsec doctor`) can only grow.',
      ),
    [
      { line: 'dsec sandbox update work --memory 2GiB --cpus 1.5', what: 'two limits' },
      { line: 'dsec sandbox update work1 work2 --cpus none', what: 'as much processor time as there is, for both' },
    ],
  );
  withLimitOptions(withJson(update))
    .argument('<names...>', 'as `dsec sandbox ls` shows them')
    .action(async (names: string[], options: LimitOptions & JsonOption) => {
      const { json, ...given } = options;
      const changes = limitChangesOf(given, program);
      const client = sandboxClient(context);
      for (const named of names) {
        const name = await client.wholeId(named);
        const limits = await client.update(name, changes);
        if (json) await output.json({ name, limits });
        else await output.line(`${name}: ${limitNames(limits)}`);
      }
    });
}

interface StatsCommand extends JsonOption {
  readonly watch?: string | true;
  readonly countDisk?: boolean;
}

/** Between the two looks that processor time is told from. */
const LOOK_MS = 500;
const WATCH_MS = 2_000;

function addStats(command: Command, context: Context): void {
  const { output, signal } = context;
  const stats = withExamples(
    command
      .command('stats')
      .description(
        'Shows what running sandboxes made by `dsec sandbox create` use: processor time (100 % is one processor), memory without what the kernel can ' +
          'take back at once, processes, bytes read from and written to disk, and what was changed on disk where that is limited (with --count-disk in any case).',
      ),
    [
      { line: 'dsec sandbox stats', what: 'all that run' },
      { line: 'dsec sandbox stats work --watch', what: 'one, again and again' },
      { line: 'dsec sandbox stats --json | jq ".[].memory.usedBytes"', what: 'for a program' },
    ],
  );
  withJson(stats)
    .argument('[names...]', 'as `dsec sandbox ls` shows them; all that run by default')
    .option('--watch [time]', 'again and again, every two seconds or so often as is said')
    .option('--count-disk', 'count what was changed file by file where no limit counts it')
    .action(async (names: string[], options: StatsCommand) => {
      const { watch } = options;
      const everyMs = typeof watch === 'string' ? parseDuration('--watch', watch) : WATCH_MS;
      if (everyMs < 100) {
        throw fail('CLI_USAGE', { problem: '--watch: every 100 ms at most', program: 'dsec sandbox stats' });
      }
      const client = sandboxClient(context);
      const look = () => looksAt(client, names, options.countDisk ?? false);
      let before = await look();
      for (let pauseMs = LOOK_MS; ; pauseMs = everyMs) {
        await delay(pauseMs, undefined, { signal });
        const now = await look();
        const rows = [...now].map(([name, usage]) => ({
          name,
          ...usage,
          cpuPercent: percentOf(before.get(name), usage),
        }));
        before = now;
        if (options.json) await output.json(rows);
        else if (rows.length === 0) output.note('no sandboxes run that were made by `dsec sandbox create`');
        else await table(rows);
        if (watch === undefined) return;
      }
    });

  async function table(rows: readonly (SandboxUsage & { readonly name: string; readonly cpuPercent: number })[]) {
    const right = (title: string) => ({ title, right: true });
    await output.table(
      [
        { title: 'NAME' },
        right('CPU'),
        right('CPU TIME'),
        right('MEMORY'),
        right('PROCESSES'),
        right('READ'),
        right('WRITTEN'),
        right('DISK'),
      ],
      rows.map(({ name, cpuPercent, cpuUsec, memory, pids, io, disk, limits }) => [
        name,
        `${cpuPercent.toFixed(1)} %`,
        `${(cpuUsec / 1e6).toFixed(2)} s`,
        ofLimit(
          humanSize(memory.usedBytes),
          limits.memoryBytes === undefined ? undefined : humanSize(limits.memoryBytes),
        ),
        ofLimit(String(pids), limits.pids?.toString()),
        humanSize(io.readBytes),
        humanSize(io.writeBytes),
        disk === undefined
          ? ''
          : ofLimit(humanSize(disk.usedBytes), disk.limitBytes === undefined ? undefined : humanSize(disk.limitBytes)),
      ]),
    );
  }
}

function ofLimit(used: string, limit: string | undefined): string {
  return limit === undefined ? used : `${used} / ${limit}`;
}

/** One that was named has to be there; of all the others one may end while we look. */
async function looksAt(
  client: SandboxClient,
  names: readonly string[],
  countDisk: boolean,
): Promise<Map<string, SandboxUsage>> {
  const wanted = names.length > 0 ? names : (await client.list()).map(({ name }) => name);
  const found = await Promise.all(
    wanted.map(async (name) => {
      try {
        return [name, await client.usage(name, countDisk)] as const;
      } catch (error) {
        if (names.length > 0) throw error;
        return undefined;
      }
    }),
  );
  return new Map(found.filter((one) => one !== undefined));
}

/** Of one processor, since the look before. */
function percentOf(before: SandboxUsage | undefined, now: SandboxUsage): number {
  if (before === undefined || now.atMs <= before.atMs) return 0;
  return (Math.max(0, now.cpuUsec - before.cpuUsec) / 1000 / (now.atMs - before.atMs)) * 100;
}
