/** The environment of a sandbox's command: the image's, then what is set here by default, then the caller's; the last value of a name holds. */
import { fail } from '../errors.ts';

export const DEFAULT_PATH = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin';

export interface EnvironmentInput {
  readonly image: readonly string[];
  /** `NAME=VALUE`, or `NAME` for the value it has in `host`; left out when it has none there. */
  readonly given: readonly string[];
  readonly host: NodeJS.ProcessEnv;
  readonly home: string;
  readonly hostname: string;
  readonly terminal: boolean;
}

/** @throws RUNTIME_ENV */
export function environmentOf(input: EnvironmentInput): string[] {
  const values = new Map<string, string>([['PATH', DEFAULT_PATH]]);
  if (input.terminal) values.set('TERM', 'xterm');
  values.set('HOSTNAME', input.hostname);
  values.set('container', 'dsec');
  // An image may hold entries without "="; programs never see those.
  for (const entry of input.image) set(values, entry);
  if (!values.has('HOME')) values.set('HOME', input.home);
  for (const entry of input.given) {
    const equals = entry.indexOf('=');
    const name = equals < 0 ? entry : entry.slice(0, equals);
    if (name === '') throw fail('RUNTIME_ENV', { entry: `"${entry}"`, problem: 'it has no name' });
    if (entry.includes('\0')) throw fail('RUNTIME_ENV', { entry: name, problem: 'it holds a NUL byte' });
    if (equals >= 0) {
      set(values, entry);
      continue;
    }
    const value = input.host[name];
    if (value !== undefined) values.set(name, value);
  }
  return [...values].map(([name, value]) => `${name}=${value}`);
}

function set(values: Map<string, string>, entry: string): void {
  const equals = entry.indexOf('=');
  if (equals > 0 && !entry.includes('\0')) values.set(entry.slice(0, equals), entry.slice(equals + 1));
}
