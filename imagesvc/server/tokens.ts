/**
 * Who may do what. A token file has a line a caller, `NAME ROLE sha256:HEX`: the digest of the token, so that whoever reads
 * the file cannot use it. Tokens are long random texts, which is why a plain digest is enough. A token in the environment
 * is hashed at once.
 *
 * A presented token is hashed and compared with all known digests, each in constant time: neither the time nor the
 * answer tells how close a guess was.
 */
import { createHash, timingSafeEqual } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { messageOf } from '#base';
import { fail } from '../errors.ts';

/** Each may do what the ones before it may: look; make images; change what others have made, and this node. */
export const ROLES = ['read', 'write', 'admin'] as const;
export type Role = (typeof ROLES)[number];

export interface Caller {
  readonly name: string;
  readonly role: Role;
}

export function allows(caller: Caller, role: Role): boolean {
  return ROLES.indexOf(caller.role) >= ROLES.indexOf(role);
}

interface Known extends Caller {
  readonly hash: Buffer;
}

export interface TokenSources {
  readonly file?: string;
  /** One token in the clear, for a caller named "environment" who may do everything. */
  readonly environment?: string;
}

export class Tokens {
  readonly #sources: TokenSources;
  #known: readonly Known[];

  /** @throws SERVER_TOKEN_FILE */
  constructor(sources: TokenSources = {}) {
    this.#sources = sources;
    this.#known = load(sources);
  }

  /** Whether there are none: then nobody is asked for one. */
  get none(): boolean {
    return this.#sources.file === undefined && !this.#sources.environment;
  }

  /** Reads the file anew; when it is wrong, what was known stays. @throws SERVER_TOKEN_FILE */
  reload(): void {
    this.#known = load(this.#sources);
  }

  find(token: string): Caller | undefined {
    const hash = sha256(token);
    let found: Known | undefined;
    for (const known of this.#known) if (timingSafeEqual(known.hash, hash)) found = known;
    return found && { name: found.name, role: found.role };
  }
}

function sha256(text: string): Buffer {
  return createHash('sha256').update(text, 'utf8').digest();
}

function load({ file, environment }: TokenSources): Known[] {
  const known = file === undefined ? [] : parseTokenFile(file, readTokenFile(file));
  if (environment) known.push({ name: 'environment', role: 'admin', hash: sha256(environment) });
  return known;
}

function readTokenFile(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw fail('SERVER_TOKEN_FILE', { path, line: 0, problem: messageOf(error) }, error);
  }
}

/** @throws SERVER_TOKEN_FILE */
export function parseTokenFile(path: string, text: string): Known[] {
  const known: Known[] = [];
  for (const [index, raw] of text.split('\n').entries()) {
    const line = raw.trim();
    if (line === '' || line.startsWith('#')) continue;
    // What a line holds is not repeated: it may be a token in the clear.
    const wrong = (problem: string) => fail('SERVER_TOKEN_FILE', { path, line: index + 1, problem });
    const [name = '', role, digest, ...rest] = line.split(/\s+/);
    if (rest.length > 0 || digest === undefined) throw wrong('it does not have three words');
    if (!/^[A-Za-z0-9][\w.@-]{0,63}$/.test(name)) throw wrong('the name must be 1 to 64 of A-Z a-z 0-9 . _ @ -');
    if (!(ROLES as readonly (string | undefined)[]).includes(role)) throw wrong('the role is unknown');
    const hex = /^sha256:([0-9a-f]{64})$/.exec(digest)?.[1];
    if (hex === undefined) throw wrong('the third word is not sha256: and 64 hex digits');
    known.push({ name, role: role as Role, hash: Buffer.from(hex, 'hex') });
  }
  if (known.length === 0) throw fail('SERVER_TOKEN_FILE', { path, line: 0, problem: 'it has no token' });
  return known;
}
