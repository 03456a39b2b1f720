/**
 * A task that is made of what another one made: the first (`from`) runs in a pool of its own, and the files that it gave back are files of the second, which
 * gets a container only then. So a compiler needs no graphics processor, nor what has one a compiler; and the files go through no client.
 */
import { isDsecError } from '#base';
import type { FnCallTask, TaskFile, TaskResult } from '#runtime';
import { fail } from '../errors.ts';

/** @throws SANDBOX_BAD_REQUEST, FNCALL_MADE_BUSY, what `runFirst` and `runSecond` throw */
export async function runMadeFrom(
  first: FnCallTask,
  runFirst: (task: FnCallTask) => Promise<TaskResult>,
  runSecond: (files: readonly TaskFile[]) => Promise<TaskResult>,
): Promise<TaskResult> {
  if ((first.fetch ?? []).length === 0) {
    throw fail('SANDBOX_BAD_REQUEST', { problem: 'from.fetch: it names no file that the task could be made of' });
  }
  const made = await runFirst(first);
  if (made.status !== 'finished') {
    const said = made.problem === undefined ? '' : `: ${made.problem}`;
    return { ...made, files: [], problem: `the task that it is made from did not end well${said}` };
  }
  if (made.files.length === 0 || made.problem !== undefined) {
    throw fail('SANDBOX_BAD_REQUEST', {
      problem: `from.fetch: ${made.problem ?? `nothing there is called ${first.fetch!.join(', ')}`}`,
    });
  }
  // What is made is often a program.
  const files = made.files.map((file) => ({ ...file, mode: 0o755 }));
  const result = await runSecond(files).catch((error: unknown) => {
    // Not as if nothing had been done: whoever looks for another node would have the first task run again.
    if (isDsecError(error, 'RUNTIME_FNCALL_BUSY')) throw fail('FNCALL_MADE_BUSY', { reason: error.message }, error);
    throw error;
  });
  return { ...result, compile: result.compile ?? made.compile, queueMs: made.queueMs + result.queueMs };
}
