/**
 * Where the API is and who calls it: what was given, else $DSEC_API and $DSEC_TOKEN, else the current context of ~/.config/dsec/contexts.json,
 * the file that `dsec context` keeps. A context's token is never sent to another URL.
 */
import { readFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import process from 'node:process';
import { ConfigurationError } from './errors.ts';

export interface Endpoint {
  readonly url: string;
  readonly token: string | undefined;
  /** Certificates of the API's own authority, as PEM. */
  readonly ca: string | undefined;
}

export interface EndpointOptions {
  readonly url?: string;
  readonly token?: string;
  /** A context of the file other than the current one. */
  readonly context?: string;
  /** Path of a file with certificates. */
  readonly ca?: string;
}

interface Context {
  readonly url?: unknown;
  readonly token?: unknown;
  readonly tokenFile?: unknown;
  readonly ca?: unknown;
}

/** @throws ConfigurationError */
export function findEndpoint(options: EndpointOptions = {}): Endpoint {
  const environment = options.context === undefined ? given(process.env.DSEC_API) : undefined;
  const url = options.url ?? environment;
  const token = options.token ?? (options.context === undefined ? given(process.env.DSEC_TOKEN) : undefined);
  if (url !== undefined && token !== undefined) return { url: checked(url), token, ca: pem(options.ca) };
  const path = contextsPath();
  const { name, context } = readContext(path, options.context, url === undefined);
  if (url !== undefined) {
    // Given without a token: the context's own, when it is of this very API.
    const same = typeof context?.url === 'string' && checked(context.url) === checked(url);
    const own = same && context !== undefined ? tokenOf(context, path) : undefined;
    return { url: checked(url), token: own, ca: pem(options.ca ?? (same ? text(context?.ca) : undefined)) };
  }
  if (context === undefined || typeof context.url !== 'string') {
    throw problem(`context ${name} of ${path} has no url`);
  }
  return {
    url: checked(context.url),
    token: token ?? tokenOf(context, path),
    ca: pem(options.ca ?? relative(path, text(context.ca))),
  };
}

export function contextsPath(): string {
  return join(given(process.env.XDG_CONFIG_HOME) ?? join(homedir(), '.config'), 'dsec', 'contexts.json');
}

function readContext(path: string, name: string | undefined, needed: boolean): { name: string; context?: Context } {
  let content: string;
  try {
    content = readFileSync(path, 'utf8');
  } catch (error) {
    if (!needed) return { name: '' };
    throw problem(`there is no API to talk to: neither a URL nor $DSEC_API nor ${path}`, error);
  }
  let file: { current?: unknown; contexts?: Record<string, Context> };
  try {
    file = JSON.parse(content) as typeof file;
  } catch (error) {
    throw problem(`${path} is no JSON`, error);
  }
  const chosen = name ?? text(file?.current);
  if (chosen === undefined || file.contexts?.[chosen] === undefined) {
    if (!needed) return { name: '' };
    throw problem(chosen === undefined ? `${path} has no current context` : `${path} has no context ${chosen}`);
  }
  return { name: chosen, context: file.contexts[chosen] };
}

function tokenOf(context: Context, path: string): string | undefined {
  if (typeof context.token === 'string') return context.token;
  if (typeof context.tokenFile !== 'string') return undefined;
  const file = relative(path, context.tokenFile)!;
  try {
    return readFileSync(file, 'utf8').trim();
  } catch (error) {
    throw problem(`the token cannot be read from ${file}`, error);
  }
}

function pem(path: string | undefined): string | undefined {
  if (path === undefined) return undefined;
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw problem(`certificates cannot be read from ${path}`, error);
  }
}

function relative(path: string, file: string | undefined): string | undefined {
  return file === undefined ? undefined : resolve(dirname(path), file.replace(/^~(?=\/)/, homedir()));
}

/** Without a slash at its end. */
function checked(url: string): string {
  let parsed: URL;
  try {
    parsed = new URL(url);
  } catch (error) {
    throw problem(`${url} is no URL`, error);
  }
  if (!['http:', 'https:'].includes(parsed.protocol)) throw problem(`${url} is no http or https URL`);
  return `${parsed.origin}${parsed.pathname.replace(/\/+$/, '')}`;
}

function given(value: string | undefined): string | undefined {
  return value === '' ? undefined : value;
}

function text(value: unknown): string | undefined {
  return typeof value === 'string' ? value : undefined;
}

function problem(message: string, cause?: unknown): ConfigurationError {
  const hint = 'run `dsec context`, or set $DSEC_API and $DSEC_TOKEN';
  return new ConfigurationError({ code: 'CONFIGURATION', message, hint, cause });
}
