/**
 * Whether the runtime service may do for a client what a process of the client's own would do: the same program, and the same
 * answer from everything outside the command line that has a say. When in doubt it declines, which costs the client a
 * millisecond.
 */
import { realpathSync } from 'node:fs';
import { dirname, resolve } from 'node:path';
import type { Greeting } from '#runtime';

/** What it is to be compared with. */
export interface ServiceSelf {
  /** Of the checkout. */
  readonly root: string;
  readonly env: NodeJS.ProcessEnv;
  /** Whether the sources are still those that run here. */
  isFresh(): boolean;
}

/** The command with its arguments, or undefined: not for the service. */
export function servableCommand(greeting: Greeting, self: ServiceSelf): readonly string[] | undefined {
  const [script, ...args] = greeting.command;
  if (script === undefined || !isServable(args)) return undefined;
  if (!sameVariables(greeting.env, self.env, /^DSEC_/)) return undefined;
  // The same text, but from the client's own folder.
  if (FOLDERS.some((name) => /^[^/]/.test(greeting.env[name] ?? ''))) return undefined;
  if (rootOf(script, greeting.cwd) !== self.root) return undefined;
  return self.isFresh() ? args : undefined;
}

/** bin/dsec says the same. */
function isServable([command, part]: readonly string[]): boolean {
  return command === 'run' || (command === 'sandbox' && (part === 'exec' || part === 'create'));
}

const FOLDERS = ['DSEC_RUN', 'DSEC_STATE', 'DSEC_CACHE'];

function rootOf(script: string, cwd: string): string | undefined {
  try {
    return dirname(dirname(realpathSync.native(resolve(cwd === '' ? '/' : cwd, script))));
  } catch {
    return undefined;
  }
}

/** Variables that say how a store that is no folder is reached, and as whom. */
const REMOTE = /^(?:AWS_.*|DOCKER_.*|SSL_.*|NODE_.*|XDG_.*|HOME|https?_proxy|no_proxy|all_proxy)$/i;

/** `store`: --store, or $DSEC_STORE, or undefined for the default one. */
export function isServableStore(store: string | undefined, env: NodeJS.ProcessEnv, own: NodeJS.ProcessEnv): boolean {
  if (store === undefined || store === '' || store.startsWith('/') || store.startsWith('file:///')) return true;
  // A path from the client's own folder.
  if (!/^[a-z0-9+.-]+:\/\//i.test(store)) return false;
  return sameVariables(env, own, REMOTE);
}

export function sameVariables(a: NodeJS.ProcessEnv, b: NodeJS.ProcessEnv, names: RegExp): boolean {
  const all = new Set([...Object.keys(a), ...Object.keys(b)].filter((name) => names.test(name)));
  return [...all].every((name) => a[name] === b[name]);
}
