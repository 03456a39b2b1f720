/**
 * Which API a command speaks to: --api, else $DSEC_API, else the current context of contexts.json, else none: this machine. The SDKs read the same file. A
 * token that was given for one URL is never sent to another.
 */
import { chmodSync, mkdirSync, readFileSync, renameSync, statSync, writeFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

export interface ApiContext {
  readonly url: string;
  readonly token?: string;
  /** Relative to the folder of contexts.json. */
  readonly tokenFile?: string;
  /** A file with the certificates of the API's own authority. */
  readonly ca?: string;
}

export interface Contexts {
  readonly current?: string;
  readonly contexts: Readonly<Record<string, ApiContext>>;
}

export interface Endpoint {
  readonly url: string;
  readonly token: string | undefined;
  readonly caFile: string | undefined;
  /** It is this one because the context is current, and nothing else was said. */
  readonly currentContext?: string;
}

type Environment = Readonly<Record<string, string | undefined>>;

export function contextsPath(env: Environment = process.env): string {
  return join(env.XDG_CONFIG_HOME || join(env.HOME || homedir(), '.config'), 'dsec', 'contexts.json');
}

/** @throws CONTEXT_FILE */
export function readContexts(path: string): Contexts {
  let text: string;
  try {
    // Most have none, and what is thrown costs more than all the rest of the question.
    if (statSync(path, { throwIfNoEntry: false }) === undefined) return { contexts: {} };
    text = readFileSync(path, 'utf8');
  } catch (error) {
    if (systemCode(error) === 'ENOENT' || systemCode(error) === 'ENOTDIR') return { contexts: {} };
    throw fail('CONTEXT_FILE', { path, problem: messageOf(error) }, error);
  }
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw fail('CONTEXT_FILE', { path, problem: `it is no JSON: ${messageOf(error)}` }, error);
  }
  const { current, contexts = {} } = (value ?? {}) as { current?: unknown; contexts?: unknown };
  const isWhole =
    typeof contexts === 'object' &&
    contexts !== null &&
    Object.values(contexts).every((one) => typeof (one as { url?: unknown } | null)?.url === 'string');
  if (!isWhole || (current !== undefined && current !== null && typeof current !== 'string')) {
    throw fail('CONTEXT_FILE', { path, problem: 'it is no {current, contexts: {NAME: {url, ...}}}' });
  }
  return { current: current ?? undefined, contexts: contexts as Contexts['contexts'] } as Contexts;
}

/** With tokens in it: its user's alone. @throws CONTEXT_FILE */
export function writeContexts(path: string, contexts: Contexts): void {
  try {
    mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
    const temporary = `${path}.${process.pid}.tmp`;
    writeFileSync(temporary, `${JSON.stringify(contexts, null, 2)}\n`, { mode: 0o600 });
    chmodSync(temporary, 0o600);
    renameSync(temporary, path);
  } catch (error) {
    throw fail('CONTEXT_FILE', { path, problem: messageOf(error) }, error);
  }
}

/** Undefined: the sandboxes of this machine are meant. @throws CONTEXT_FILE, CONTEXT_NONE, CONTEXT_URL, CONTEXT_TOKEN */
export function findEndpoint(api: string | undefined, env: Environment = process.env): Endpoint | undefined {
  const path = contextsPath(env);
  const given = api ?? (env.DSEC_API || undefined);
  const token = env.DSEC_TOKEN || undefined;
  if (given === undefined) {
    const { current, contexts } = readContexts(path);
    if (current === undefined) return undefined;
    const context = contexts[current];
    if (context === undefined) throw fail('CONTEXT_NONE', { name: current, path });
    return {
      url: checkedUrl(context.url),
      token: token ?? tokenOf(context, path),
      caFile: relativeTo(path, context.ca),
      currentContext: current,
    };
  }
  if (given === 'local' || given === '') return undefined;
  const { contexts } = readContexts(path);
  // A context may be named too: for one command, without changing to it.
  const named = contexts[given];
  if (named !== undefined) {
    return { url: checkedUrl(named.url), token: tokenOf(named, path), caFile: relativeTo(path, named.ca) };
  }
  const url = checkedUrl(given);
  const same = Object.values(contexts).find((context) => context.url.replace(/\/+$/, '') === url);
  return {
    url,
    token: token ?? (same === undefined ? undefined : tokenOf(same, path)),
    caFile: same === undefined ? undefined : relativeTo(path, same.ca),
  };
}

/** Without a slash at its end. @throws CONTEXT_URL */
export function checkedUrl(url: string): string {
  const parsed = URL.canParse(url) ? new URL(url) : undefined;
  if (parsed === undefined || !['http:', 'https:'].includes(parsed.protocol)) throw fail('CONTEXT_URL', { url });
  return `${parsed.origin}${parsed.pathname.replace(/\/+$/, '')}`;
}

function tokenOf({ token, tokenFile }: ApiContext, path: string): string | undefined {
  if (token !== undefined) return token;
  const file = relativeTo(path, tokenFile);
  if (file === undefined) return undefined;
  try {
    return readFileSync(file, 'utf8').trim();
  } catch (error) {
    throw fail('CONTEXT_TOKEN', { file, problem: messageOf(error) }, error);
  }
}

function relativeTo(path: string, file: string | undefined): string | undefined {
  return file === undefined ? undefined : resolve(dirname(path), file.replace(/^~(?=\/)/, homedir()));
}
