/** `dsec sandbox pause`, `resume` and `fork`: sandboxes that stand still, and new ones with the files of another. */
import type { Command } from 'commander';
import { humanSize } from '#base';
import type { PauseReport } from '#runtime';
import { fail } from '../../errors.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export function addPauseCommands(command: Command, context: Context): void {
  const { output } = context;
  const pause = withExamples(
    command
      .command('pause')
      .description(
        'Has all commands of a sandbox stand still and gives their memory back to the machine, where it has swap (zram or a file; `dsec doctor` says). Files, ' +
          'sockets and timers live on, and --ttl goes on. Any request resumes it: exec, cp, a shell, input, a connection. What only looks (ls, logs) does not. ' +
          'One that is paused already is no error.',
      ),
    [
      { line: 'dsec sandbox pause work', what: 'until somebody wants something of it' },
      { line: "dsec sandbox pause work --json | jq '.[0].afterBytes'", what: 'what it still takes' },
    ],
  );
  withJson(pause)
    .argument('<names...>', 'as `dsec sandbox ls` shows them')
    .action(async (names: string[], options: JsonOption) => {
      const reports: ({ readonly name: string } & PauseReport)[] = [];
      const client = sandboxClient(context);
      for (const named of names) {
        const name = await client.wholeId(named);
        const report = { name, ...(await client.pause(name)) };
        reports.push(report);
        if (!options.json) await output.line(`${name}: ${pauseText(report)}`);
      }
      if (options.json) await output.json(reports);
    });

  const resume = withExamples(
    command
      .command('resume')
      .description('Has a paused sandbox go on where it was. One that is not paused is no error.'),
    [{ line: 'dsec sandbox resume work', what: 'before somebody waits for it' }],
  );
  withJson(resume)
    .argument('<names...>', 'as `dsec sandbox ls` shows them')
    .action(async (names: string[], options: JsonOption) => {
      const client = sandboxClient(context);
      const resumed: string[] = [];
      for (const named of names) {
        const name = await client.wholeId(named);
        await client.resume(name);
        resumed.push(name);
        if (!options.json) await output.line(`${name}: running`);
      }
      if (options.json) await output.json({ resumed });
    });

  const fork = withExamples(
    command
      .command('fork')
      .description(
        'Makes new sandboxes that begin with the files of one that runs or is paused, as they are at one moment; processes are not copied, and that one goes on. Its ' +
          'changes become an image of the store, which stays until `dsec rm`. Limits, class, --idle, user and environment are those of the other, its --ttl is not. Prints their names. ' +
          'With --memory (--backend microvm and vm) what runs in it goes on in each, and no image is made.',
      ),
    [
      { line: 'dsec sandbox fork work --count 4', what: 'four that go on from here' },
      { line: 'dsec sandbox fork work --snapshot work-done:3', what: 'one, and the image is called so' },
      { line: 'dsec sandbox fork box --memory --count 8', what: 'eight that go on where this virtual machine is' },
    ],
  );
  withJson(fork)
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .option('-c, --count <n>', 'how many', '1')
    .option('--memory', 'of a virtual machine: with its memory, so that its processes go on in each')
    .option('--snapshot <name:tag>', 'of the image (default: fork-NAME and a random tag)')
    .option('--ttl <time>', 'each ends after so long')
    .option('--request-id <id>', 'asked for again with the same id, the same sandboxes are the answer')
    .action(async (name: string, options: ForkCommand) => {
      const { memory, snapshot, ttl, requestId } = options;
      const forked = await sandboxClient(context).fork(name, {
        count: countOf(options.count),
        memory,
        snapshot,
        requestId,
        ttlMs: ttl === undefined ? undefined : parseDuration('--ttl', ttl),
      });
      for (const note of forked.notes) output.note(`${name}: ${note}`);
      if (options.json) return output.json(forked);
      for (const sandbox of forked.sandboxes) await output.line(sandbox.name);
    });
}

interface ForkCommand extends JsonOption {
  readonly count: string;
  readonly memory?: boolean;
  readonly snapshot?: string;
  readonly ttl?: string;
  readonly requestId?: string;
}

function countOf(text: string): number {
  if (!/^[1-9]\d{0,3}$/.test(text) || Number(text) > 1000) {
    throw fail('CLI_USAGE', { problem: `--count ${text}: a number from 1 to 1000`, program: 'dsec sandbox fork' });
  }
  return Number(text);
}

function pauseText({ beforeBytes, afterBytes, reason }: PauseReport): string {
  if (reason === 'no swap') return `paused; its ${humanSize(afterBytes)} of memory stay: this machine has no swap`;
  if (reason !== undefined) return `paused; its memory stays: ${reason}`;
  return `paused; of ${humanSize(beforeBytes)} of memory ${humanSize(Math.max(0, beforeBytes - afterBytes))} were given back`;
}
