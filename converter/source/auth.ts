/**
 * Who we are to a registry: the Authorization header for each request, from challenge to token.
 *
 * A registry answers 401 with a challenge. Basic: the user's password. Bearer: a token server (the realm) issues tokens
 * for a scope; they are kept until shortly before they expire, asked for once however many requests wait, and given up
 * when the registry refuses one. The realm may change at any time. Credentials are looked up when first needed.
 */
import type { DsecError } from '#base';
import { fail } from '../errors.ts';
import { type Challenge, parseChallenges } from './challenge.ts';
import type { Credentials, FoundCredentials } from './credentials.ts';
import { discard, type HttpClient, type HttpResponse, isLoopback, readBody } from './http-client.ts';
import { quote } from './quote.ts';
import { type Clock, parseRetryAfter, TransientFailure } from './retry.ts';

interface Token {
  readonly text: string;
  /** When to ask for another. */
  readonly staleAt: number;
}

interface BearerChallenge {
  readonly realm: URL;
  readonly service: string | undefined;
  /** As the registry put it, where it did. */
  readonly scope: string | undefined;
}

export interface AuthOptions {
  readonly registry: string;
  readonly http: HttpClient;
  readonly clock: Clock;
  readonly insecure: boolean;
  /** Ends token requests. Never a single caller's: others may wait for the same token. */
  readonly signal: AbortSignal | undefined;
  /** Called once. */
  readonly find: (repository: string) => Promise<FoundCredentials>;
}

const CLIENT_ID = 'dsec';
const MAX_TOKEN_ANSWER = 1024 * 1024;
/** What the token specification gives a token without `expires_in`. */
const DEFAULT_LIFE_S = 60;

export class RegistryAuth {
  readonly #options: AuthOptions;
  readonly #tokens = new Map<string, Promise<Token>>();
  readonly #secrets = new Set<string>();
  #found: Promise<FoundCredentials> | undefined;
  #bearer: BearerChallenge | undefined;
  #basic: string | undefined;
  #notes: readonly string[] = [];

  constructor(options: AuthOptions) {
    this.#options = options;
  }

  /** The header for a request in `scope` (`repository:NAME:pull`), as far as is known before asking. */
  async header(repository: string, scope: string): Promise<string | undefined> {
    if (this.#basic !== undefined) return this.#basic;
    const bearer = this.#bearer;
    if (bearer === undefined) return undefined;
    const kept = this.#tokens.get(scope);
    if (kept !== undefined) {
      // A fetch that failed is not kept: see #tokenFor.
      const token = await kept;
      if (this.#options.clock.now() < token.staleAt) return `Bearer ${token.text}`;
      if (this.#tokens.get(scope) === kept) this.#tokens.delete(scope);
    }
    const token = await this.#tokenFor({ ...bearer, scope: undefined }, repository, scope);
    return `Bearer ${token.text}`;
  }

  /**
   * After a 401 to a request sent with `used`: gets what the challenge wants and says what that was. Undefined when nothing
   * more can be done, which includes what is in `done`: the same answer twice will not help.
   */
  async answer(
    header: string | undefined,
    repository: string,
    scope: string,
    used: string | undefined,
    done: ReadonlySet<string>,
  ): Promise<string | undefined> {
    const challenges = parseChallenges(header ?? '');
    const bearer = challenges.find((challenge) => challenge.scheme === 'bearer');
    if (bearer !== undefined) return this.#answerBearer(bearer, repository, scope, used, done);
    if (challenges.some((challenge) => challenge.scheme === 'basic')) {
      const credentials = await this.#credentials(repository);
      if (credentials?.kind !== 'password') return undefined;
      this.#basic = this.#basicHeader(credentials.user, credentials.password);
      this.#bearer = undefined;
      return used === this.#basic ? undefined : 'basic';
    }
    return undefined;
  }

  /** Text from outside with everything secret taken out. */
  redact(text: string): string {
    let out = text;
    for (const secret of this.#secrets) out = out.replaceAll(secret, '***');
    return out;
  }

  /** What to add to a refusal: a helper that failed, or that nothing was found. */
  note(): string {
    return this.#notes.length === 0 ? '' : `; ${this.#notes.join('; ')}`;
  }

  async #answerBearer(
    challenge: Challenge,
    repository: string,
    scope: string,
    used: string | undefined,
    done: ReadonlySet<string>,
  ): Promise<string | undefined> {
    const bearer = this.#parseBearer(challenge);
    const did = `bearer ${bearer.realm} ${bearer.service} ${bearer.scope}`;
    if (done.has(did)) return undefined;
    this.#bearer = bearer;
    this.#basic = undefined;
    const kept = this.#tokens.get(scope);
    // Another request may have renewed the token since this one was sent; otherwise what was used is worthless.
    const current = kept === undefined ? undefined : await kept.catch(() => undefined);
    if (current === undefined || `Bearer ${current.text}` === used) {
      if (this.#tokens.get(scope) === kept) this.#tokens.delete(scope);
      await this.#tokenFor(bearer, repository, scope);
    }
    return did;
  }

  #parseBearer(challenge: Challenge): BearerChallenge {
    const realm = challenge.params.get('realm') ?? '';
    let url: URL;
    try {
      url = new URL(realm);
    } catch {
      throw this.#unexpected('authentication', `the token server ${quote(realm)} is not an address`);
    }
    const secure =
      url.protocol === 'https:' || (url.protocol === 'http:' && (this.#options.insecure || isLoopback(url.hostname)));
    if (!secure) {
      throw this.#unexpected(
        'authentication',
        `the token server ${quote(`${url.protocol}//${url.host}`)} would get credentials unencrypted`,
      );
    }
    url.username = '';
    url.password = '';
    return { realm: url, service: challenge.params.get('service'), scope: challenge.params.get('scope') };
  }

  #tokenFor(bearer: BearerChallenge, repository: string, scope: string): Promise<Token> {
    const running = this.#tokens.get(scope);
    if (running !== undefined) return running;
    const fetching = this.#fetchToken(bearer, repository, scope);
    this.#tokens.set(scope, fetching);
    fetching.catch(() => {
      if (this.#tokens.get(scope) === fetching) this.#tokens.delete(scope);
    });
    return fetching;
  }

  async #fetchToken(bearer: BearerChallenge, repository: string, ownScope: string): Promise<Token> {
    const { http, clock, signal } = this.#options;
    const credentials = await this.#credentials(repository);
    // Several scopes (a mount reads one repository and writes another) are several parameters.
    const scopes = [...new Set([...ownScope.split(' '), ...(bearer.scope?.split(' ') ?? [])])].filter((s) => s !== '');
    const action = `token from ${bearer.realm.host}`;
    const asked = clock.now();
    let response: HttpResponse;
    if (credentials?.kind === 'identity') {
      const form = new URLSearchParams({
        grant_type: 'refresh_token',
        client_id: CLIENT_ID,
        refresh_token: credentials.token,
      });
      if (bearer.service !== undefined) form.set('service', bearer.service);
      form.set('scope', scopes.join(' '));
      response = await http.send({
        method: 'POST',
        url: bearer.realm,
        headers: { 'content-type': 'application/x-www-form-urlencoded', accept: 'application/json' },
        body: () => Buffer.from(form.toString()),
        secretBody: true,
        action,
        signal,
      });
    } else {
      const url = new URL(bearer.realm);
      if (bearer.service !== undefined) url.searchParams.set('service', bearer.service);
      for (const scope of scopes) url.searchParams.append('scope', scope);
      let authorization: string | undefined;
      if (credentials !== undefined) {
        url.searchParams.set('account', credentials.user);
        authorization = this.#basicHeader(credentials.user, credentials.password);
      }
      response = await http.send({
        method: 'GET',
        url,
        headers: { accept: 'application/json' },
        authorization,
        action,
        signal,
      });
    }
    return this.#readToken(response, action, repository, asked, credentials !== undefined);
  }

  async #readToken(
    response: HttpResponse,
    action: string,
    repository: string,
    asked: number,
    named: boolean,
  ): Promise<Token> {
    const { registry, clock, signal } = this.#options;
    const { status } = response;
    if (status === 429 || status >= 500) {
      discard(response);
      throw new TransientFailure(
        fail('SOURCE_REGISTRY_BUSY', { registry, action, status, detail: '' }),
        parseRetryAfter(response.header('retry-after'), clock.now()),
      );
    }
    if (status !== 200) {
      discard(response);
      const detail = named
        ? `: it refused the credentials (status ${status})`
        : `: it refused an anonymous request (status ${status})`;
      throw fail('SOURCE_REGISTRY_UNAUTHORIZED', { registry, repository, action, detail: detail + this.note() });
    }
    const bytes = await readBody(registry, action, response, MAX_TOKEN_ANSWER, signal);
    // Not parsed with the usual reader, whose messages quote what they read.
    let answer: Record<string, unknown>;
    try {
      answer = JSON.parse(bytes.toString('utf8')) as Record<string, unknown>;
    } catch {
      throw this.#unexpected(action, 'not JSON');
    }
    const text = [answer?.token, answer?.access_token].find((value) => typeof value === 'string' && value !== '');
    if (typeof text !== 'string' || !/^[\x21-\x7e]+$/.test(text)) throw this.#unexpected(action, 'no token in it');
    const life = answer.expires_in;
    const lifeS = typeof life === 'number' && life > 0 ? Math.min(life, 24 * 3600) : DEFAULT_LIFE_S;
    this.#secret(text);
    return { text, staleAt: asked + lifeS * 900 };
  }

  async #credentials(repository: string): Promise<Credentials | undefined> {
    this.#found ??= this.#options.find(repository);
    const { credentials, notes } = await this.#found;
    this.#notes = notes;
    if (credentials?.kind === 'identity') this.#secret(credentials.token);
    return credentials;
  }

  #basicHeader(user: string, password: string): string {
    const encoded = Buffer.from(`${user}:${password}`).toString('base64');
    this.#secret(password);
    this.#secret(encoded);
    return `Basic ${encoded}`;
  }

  #secret(text: string): void {
    // Shorter ones would blot out ordinary words.
    if (text.length >= 3) this.#secrets.add(text);
  }

  #unexpected(action: string, problem: string): DsecError {
    return fail('SOURCE_REGISTRY_RESPONSE', { registry: this.#options.registry, action, problem });
  }
}
