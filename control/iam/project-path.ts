/** Paths of projects: `root/team/run`. The path says the chain of parents, so no question needs to walk the tree. */
import { fail } from '../errors.ts';
import { shownText } from './checked-text.ts';

export const ROOT = 'root';
const MAX_LENGTH = 1024;
const SEGMENT = /^[a-z0-9][a-z0-9._-]{0,62}$/;

/** @throws IAM_BAD_REQUEST */
export function checkPath(path: string): string {
  const segments = path.split('/');
  if (segments[0] !== ROOT)
    throw fail('IAM_BAD_REQUEST', { problem: `project ${shownText(path)}: it begins with "${ROOT}"` });
  if (path.length > MAX_LENGTH) {
    throw fail('IAM_BAD_REQUEST', { problem: `project ${shownText(path)}: longer than ${MAX_LENGTH} characters` });
  }
  for (const segment of segments) {
    if (!SEGMENT.test(segment)) {
      const problem = `project ${shownText(path)}: each part is 1 to 63 of a-z, 0-9, ".", "_", "-", and begins with a letter or digit`;
      throw fail('IAM_BAD_REQUEST', { problem });
    }
  }
  return path;
}

export function parentOf(path: string): string | undefined {
  const end = path.lastIndexOf('/');
  return end < 0 ? undefined : path.slice(0, end);
}

/** From the top to `path` itself. */
export function chainOf(path: string): string[] {
  const chain: string[] = [];
  for (let end = path.indexOf('/'); end >= 0; end = path.indexOf('/', end + 1)) chain.push(path.slice(0, end));
  chain.push(path);
  return chain;
}

/** Whether `path` is `above` or lies below it. */
export function isWithin(path: string, above: string): boolean {
  return path.startsWith(above) && (path.length === above.length || path[above.length] === '/');
}

/** SQL for `isWithin`, with the values of `within`. */
export function withinSql(column: string): string {
  // '0' comes right after '/'.
  return `(${column} = ? OR (${column} > ? AND ${column} < ?))`;
}

export function within(above: string): [string, string, string] {
  return [above, `${above}/`, `${above}0`];
}
