/**
 * Authorities of tokens, remembered for CACHE_MS from the moment they were asked for. `forget` is called after every change here that may
 * take something away, and makes what is being read at that moment unfit for anybody who comes later.
 */
import { fail } from '../errors.ts';
import { type Authority, loadAuthority } from './authority.ts';
import type { Database } from './database/database.ts';
import { CACHE_MS, type Identity } from './iam.ts';
import { isTokenText, tokenHash } from './token-text.ts';

/** Past it all are forgotten: simple, and they are all read again within a second anyway. */
const MAX_REMEMBERED = 100_000;

interface Remembered {
  readonly askedAt: number;
  readonly authority: Promise<Authority | undefined>;
}

export class Authorities {
  readonly #database: Database;
  readonly #now: () => number;
  readonly #known = new Map<string, Remembered>();

  constructor(database: Database, now: () => number) {
    this.#database = database;
    this.#now = now;
  }

  /** @throws IAM_TOKEN_INVALID */
  async ofToken(token: string): Promise<Authority> {
    if (typeof token !== 'string' || !isTokenText(token)) throw fail('IAM_TOKEN_INVALID');
    return this.#get({ hash: tokenHash(token) });
  }

  /** @throws IAM_TOKEN_INVALID */
  async of(identity: Identity): Promise<Authority> {
    return this.#get({ tokenId: identity.tokenId });
  }

  forget(): void {
    this.#known.clear();
  }

  async #get(by: { readonly hash: string } | { readonly tokenId: string }): Promise<Authority> {
    const key = 'hash' in by ? by.hash : by.tokenId;
    const now = this.#now();
    let known = this.#known.get(key);
    // Also when the clock went back.
    if (known === undefined || Math.abs(now - known.askedAt) >= CACHE_MS) {
      if (this.#known.size >= MAX_REMEMBERED) this.#known.clear();
      const authority = loadAuthority((sql, ...values) => this.#database.read(sql, ...values), by, now);
      const fresh: Remembered = { askedAt: now, authority };
      known = fresh;
      this.#known.set(key, fresh);
      const drop = () => {
        if (this.#known.get(key) === fresh) this.#known.delete(key);
      };
      // Who was unknown a moment ago may have been made since, by another process.
      authority.then((found) => {
        if (found === undefined) drop();
        // Not when `forget` was called meanwhile.
        else if (this.#known.get(key) === fresh) this.#known.set(found.identity.tokenId, fresh);
      }, drop);
    }
    const found = await known.authority;
    if (found === undefined || (found.identity.expiresAtMs ?? Number.POSITIVE_INFINITY) <= this.#now()) {
      throw fail('IAM_TOKEN_INVALID');
    }
    return found;
  }
}
