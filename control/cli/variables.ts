/** Variables for commands in a sandbox, as -e takes them: NAME=VALUE, or NAME for what it is here. */
import type { Context } from './context.ts';
import { refuseInexactVariables } from './exact-text.ts';

/** @throws CLI_NOT_UTF8 */
export function variables(
  program: string,
  given: readonly string[] | undefined,
  { caller }: Context,
): string[] | undefined {
  if (given === undefined) return undefined;
  refuseInexactVariables(
    program,
    given.filter((entry) => !entry.includes('=')),
  );
  return given.flatMap((entry) => {
    if (entry.includes('=')) return [entry];
    const value = (caller?.env ?? process.env)[entry];
    return value === undefined ? [] : [`${entry}=${value}`];
  });
}
