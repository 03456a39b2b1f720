/**
 * Where the user's credentials for a registry are: `--creds`, then the files and helpers that Docker and skopeo keep.
 *
 * Files, in this order: $REGISTRY_AUTH_FILE, ${XDG_RUNTIME_DIR}/containers/auth.json, $DOCKER_CONFIG/config.json or
 * ~/.docker/config.json. In one file: credHelpers, credsStore, auths. Nothing read here ever stands in a message: not
 * the values, and no snippet of a file that cannot be parsed.
 */
import { spawn } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { systemCode } from '#base';
import { fail } from '../errors.ts';
import { quote } from './quote.ts';

export type Credentials =
  | { readonly kind: 'password'; readonly user: string; readonly password: string }
  /** An OAuth2 refresh token. */
  | { readonly kind: 'identity'; readonly token: string };

export interface FoundCredentials {
  readonly credentials: Credentials | undefined;
  /** What went wrong on the way, for the message if access is then refused: a helper that is missing or failed. */
  readonly notes: readonly string[];
}

const DOCKER_HUB_KEY = 'https://index.docker.io/v1/';
const HELPER_TIMEOUT_MS = 30_000;
const MAX_HELPER_BYTES = 256 * 1024;

/** `user:password`. @throws SOURCE_CREDENTIALS */
export function parseCredentials(text: string): Credentials {
  const colon = text.indexOf(':');
  if (colon < 1) throw fail('SOURCE_CREDENTIALS', { where: '--creds', problem: 'not of the form USER:PASSWORD' });
  return { kind: 'password', user: text.slice(0, colon), password: text.slice(colon + 1) };
}

/**
 * What the user's files hold for a repository of a registry.
 * @throws SOURCE_CREDENTIALS for a file that cannot be read or parsed
 */
export async function findCredentials(
  registry: string,
  repository: string,
  env: NodeJS.ProcessEnv,
): Promise<FoundCredentials> {
  const notes: string[] = [];
  for (const path of authFiles(env)) {
    const config = await readAuthFile(path);
    if (config === undefined) continue;
    const credentials = await fromConfig(config, path, registry, repository, env, notes);
    if (credentials !== undefined) return { credentials, notes };
  }
  return { credentials: undefined, notes };
}

function authFiles(env: NodeJS.ProcessEnv): string[] {
  const files: string[] = [];
  if (env.REGISTRY_AUTH_FILE) files.push(env.REGISTRY_AUTH_FILE);
  if (env.XDG_RUNTIME_DIR) files.push(join(env.XDG_RUNTIME_DIR, 'containers', 'auth.json'));
  files.push(join(env.DOCKER_CONFIG || join(env.HOME || homedir(), '.docker'), 'config.json'));
  return files;
}

type Json = Record<string, unknown>;

async function readAuthFile(path: string): Promise<Json | undefined> {
  let text: string;
  try {
    text = await readFile(path, 'utf8');
  } catch (error) {
    const code = systemCode(error);
    if (code === 'ENOENT' || code === 'ENOTDIR') return undefined;
    throw fail('SOURCE_CREDENTIALS', { where: path, problem: `cannot be read (${code})` });
  }
  if (text.trim() === '') return undefined;
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw fail('SOURCE_CREDENTIALS', { where: path, problem: 'not valid JSON' });
  }
  const config = asObject(value);
  if (config === undefined) throw fail('SOURCE_CREDENTIALS', { where: path, problem: 'not a JSON object' });
  return config;
}

async function fromConfig(
  config: Json,
  path: string,
  registry: string,
  repository: string,
  env: NodeJS.ProcessEnv,
  notes: string[],
): Promise<Credentials | undefined> {
  const helpers = asObject(config.credHelpers) ?? {};
  const server = registry === 'docker.io' ? DOCKER_HUB_KEY : registry;
  for (const key of hostKeys(registry)) {
    if (typeof helpers[key] !== 'string') continue;
    const found = await askHelper(helpers[key], key === registry ? server : key, env, notes);
    if (found) return found;
  }
  if (typeof config.credsStore === 'string' && config.credsStore !== '') {
    const found = await askHelper(config.credsStore, server, env, notes);
    if (found) return found;
  }
  return fromAuths(asObject(config.auths) ?? {}, path, registry, repository);
}

function fromAuths(auths: Json, path: string, registry: string, repository: string): Credentials | undefined {
  const byKey = new Map(Object.entries(auths).map(([key, value]) => [normalizedKey(key), value]));
  for (const key of repositoryKeys(registry, repository)) {
    const entry = asObject(byKey.get(key));
    if (entry === undefined) continue;
    const problem = (text: string) =>
      fail('SOURCE_CREDENTIALS', { where: `${path}: auths ${quote(key)}`, problem: text });
    if (typeof entry.identitytoken === 'string' && entry.identitytoken !== '') {
      return { kind: 'identity', token: entry.identitytoken };
    }
    if (typeof entry.auth === 'string' && entry.auth !== '') {
      const text = Buffer.from(entry.auth, 'base64').toString('utf8').replace(/\0+$/, '');
      const colon = text.indexOf(':');
      if (colon < 1) throw problem('field auth is not the base64 of USER:PASSWORD');
      return { kind: 'password', user: text.slice(0, colon), password: text.slice(colon + 1) };
    }
    if (typeof entry.username === 'string' && typeof entry.password === 'string' && entry.username !== '') {
      return { kind: 'password', user: entry.username, password: entry.password };
    }
  }
  return undefined;
}

/** Names under which files keep a registry. */
function hostKeys(registry: string): string[] {
  return registry === 'docker.io'
    ? [DOCKER_HUB_KEY, 'index.docker.io', 'docker.io', 'registry-1.docker.io']
    : [registry];
}

/** `https://host/v1/` -> `host`; keys with a path below the host (containers' auth.json) keep it. */
function normalizedKey(key: string): string {
  const bare = key.replace(/^https?:\/\//, '').replace(/\/+$/, '');
  return bare.replace(/\/v[12]$/, '');
}

/** From the most particular to the host alone. */
function repositoryKeys(registry: string, repository: string): string[] {
  const keys: string[] = [];
  const parts = repository.split('/');
  for (let n = parts.length; n > 0; n--) keys.push(`${registry}/${parts.slice(0, n).join('/')}`);
  for (const key of hostKeys(registry)) keys.push(normalizedKey(key));
  return keys;
}

async function askHelper(
  name: string,
  server: string,
  env: NodeJS.ProcessEnv,
  notes: string[],
): Promise<Credentials | undefined> {
  const program = `docker-credential-${name}`;
  if (!/^[A-Za-z0-9._-]+$/.test(name)) {
    notes.push(`the credential helper ${quote(name)} has no usable name`);
    return undefined;
  }
  const answer = await runHelper(program, server, env);
  if (typeof answer === 'string') {
    notes.push(answer);
    return undefined;
  }
  const { Username: user, Secret: secret } = answer;
  if (typeof user !== 'string' || typeof secret !== 'string') {
    if (Object.keys(answer).length > 0) notes.push(`${program} answered without Username and Secret`);
    return undefined;
  }
  if (secret === '') return undefined;
  return user === '<token>' ? { kind: 'identity', token: secret } : { kind: 'password', user, password: secret };
}

/** The helper's answer (empty when it knows nothing), or what went wrong. */
function runHelper(program: string, server: string, env: NodeJS.ProcessEnv): Promise<Json | string> {
  return new Promise((done) => {
    const child = spawn(program, ['get'], { env, stdio: ['pipe', 'pipe', 'ignore'], timeout: HELPER_TIMEOUT_MS });
    const parts: Buffer[] = [];
    let size = 0;
    child.stdout.on('data', (part: Buffer) => {
      size += part.length;
      if (size > MAX_HELPER_BYTES) child.kill('SIGKILL');
      else parts.push(part);
    });
    child.on('error', (error) => {
      done(
        systemCode(error) === 'ENOENT'
          ? `${program} is not installed`
          : `${program} cannot be run (${systemCode(error)})`,
      );
    });
    child.on('close', (code, signal) => {
      const text = Buffer.concat(parts).toString('utf8');
      if (code !== 0) {
        // The agreed way to say that there is nothing.
        if (/credentials not found/i.test(text)) done({});
        else done(`${program} failed (${signal ?? `status ${code}`})`);
        return;
      }
      let value: unknown;
      try {
        value = JSON.parse(text);
      } catch {
        value = undefined;
      }
      done(asObject(value) ?? `${program} answered no JSON object`);
    });
    // A helper that does not read its input closes the pipe early.
    child.stdin.on('error', () => {});
    child.stdin.end(`${server}\n`);
  });
}

function asObject(value: unknown): Json | undefined {
  return typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Json) : undefined;
}
