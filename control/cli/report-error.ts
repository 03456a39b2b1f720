/**
 * How anything thrown reaches the user: what went wrong, what to do about it, an exit status a script can use.
 *
 * Errors of a table speak for themselves. Errors of the system (disk full, permission) keep their text. Everything else is a
 * fault of ours and says so; its stack is shown with DSEC_DEBUG=1.
 */
import { DsecError, displayText, messageOf, systemCode } from '#base';
import { storeOfSudoUser } from './other-store.ts';

export interface ErrorReport {
  readonly exit: number;
  readonly code: string;
  readonly message: string;
  readonly hint: string | undefined;
  /** Set when the user can do nothing about it. */
  readonly stack: string | undefined;
}

const SYSTEM_HINTS: Readonly<Record<string, string>> = {
  EACCES: 'check the permissions of the path, or run it as root',
  EDQUOT: 'free some of your quota',
  EMFILE: 'raise the limit of open files: ulimit -n 65536',
  ENOSPC: 'free some space, or name another store with --store',
  EPERM: 'this needs root',
  EROFS: 'name another store with --store',
};

export function reportOf(error: unknown): ErrorReport {
  if (error instanceof DsecError) {
    return { exit: error.exit, code: error.code, message: error.message, hint: error.hint, stack: error.stack };
  }
  const code = systemCode(error);
  // A system error carries the failed call; Node's own argument errors (ERR_*) do not and are our fault.
  if (code !== undefined && (error as { syscall?: unknown }).syscall !== undefined) {
    const exit = code === 'EACCES' || code === 'EPERM' ? 5 : code === 'ENOENT' ? 4 : 1;
    return { exit, code, message: messageOf(error), hint: SYSTEM_HINTS[code], stack: stackOf(error) };
  }
  return {
    exit: 1,
    code: 'BUG',
    message: `unexpected: ${messageOf(error).split('\n')[0]}`,
    hint: 'this is a bug in dsec: run it again with DSEC_DEBUG=1 and report what it prints',
    stack: stackOf(error),
  };
}

function stackOf(error: unknown): string | undefined {
  return error instanceof Error ? error.stack : undefined;
}

/** The text for stderr, with its line end. */
export function reportText(report: ErrorReport, as: { readonly json: boolean; readonly debug: boolean }): string {
  const { code, hint, stack } = report;
  const message = displayText(report.message);
  if (as.json) return `${JSON.stringify({ error: { code, message, hint, ...(as.debug ? { stack } : {}) } })}\n`;
  const lines = [`dsec: ${message}`];
  if (hint !== undefined) lines.push(`      ${hint}`);
  if (as.debug && stack !== undefined) lines.push(stack);
  return `${lines.join('\n')}\n`;
}

/** What a whole command line that failed says on stderr, and its exit status. */
export function failureOf(
  error: unknown,
  argv: readonly string[],
  env: NodeJS.ProcessEnv = process.env,
): { readonly text: string; readonly exit: number } {
  const report = withOtherStore(reportOf(error), argv, env);
  const text = reportText(report, { json: wantsJson(argv), debug: env.DSEC_DEBUG === '1' });
  return { text, exit: report.exit };
}

/** An image that root's store lacks may be in that of whoever called sudo. */
function withOtherStore(report: ErrorReport, argv: readonly string[], env: NodeJS.ProcessEnv): ErrorReport {
  if (report.code !== 'CATALOG_NOT_FOUND' || argv.some((arg) => /^--store(=|$)/.test(arg))) return report;
  const store = storeOfSudoUser(env);
  if (store === undefined) return report;
  return { ...report, hint: `this is root's store; yours is another: --store ${store}` };
}

function wantsJson(argv: readonly string[]): boolean {
  const end = argv.indexOf('--');
  return argv.slice(0, end < 0 ? undefined : end).includes('--json');
}
