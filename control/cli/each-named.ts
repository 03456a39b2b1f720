/** The same for each of several names: one that fails keeps the others from nothing. */
import type { Context } from './context.ts';
import { reportOf, reportText } from './report-error.ts';

/**
 * The names that it was done for. Of several, what failed is told on stderr, and the exit status is the worst.
 * @throws what `work` throws, where one was named alone; where the command has been told to end
 */
export async function eachNamed(
  names: readonly string[],
  work: (name: string) => Promise<void>,
  context: Context,
  { json = false }: { readonly json?: boolean } = {},
): Promise<string[]> {
  const done: string[] = [];
  for (const name of names) {
    try {
      await work(name);
      done.push(name);
    } catch (error) {
      if (names.length === 1 || context.signal.aborted) throw error;
      const report = reportOf(error);
      context.output.note(reportText(report, { json, debug: process.env.DSEC_DEBUG === '1' }).trimEnd());
      context.exitCode = Math.max(context.exitCode, report.exit);
    }
  }
  return done;
}
