/**
 * What a name leads to, by the upstreams: CNAMEs are followed here, record by record, until addresses come or there are none. Records that are not on the
 * way from the asked name are not looked at. Answers are kept for as long as they say; the same question is asked once at a time.
 */
import { Slots } from '#base';
import { AnswerCache } from './answer-cache.ts';
import { ASK_LIMITS, type AskLimits, askUpstream } from './ask-upstream.ts';
import { RCODE, TYPE, type UpstreamAnswer } from './dns-message.ts';
import type { UpstreamServers } from './upstream-servers.ts';

export interface Found {
  /** `RCODE.ok`, `noName` or `failed`. */
  readonly rcode: number;
  /** Of the type asked for, each once; without any there is nothing of it. */
  readonly data: readonly Buffer[];
  /** Until then it holds. */
  readonly untilMs: number;
}

export interface LookupOptions {
  readonly servers: UpstreamServers;
  readonly limits?: AskLimits;
  /** Answers that are kept; 10,000. */
  readonly cached?: number;
  /** Questions under way; 256. Some thousands wait, what comes beyond fails. */
  readonly underWay?: number;
  readonly now?: () => number;
}

const MAX_WAITING = 4_096;
const MAX_CNAMES = 12;
const MAX_RECORDS = 64;
const ROUNDS = 2;
const MAX_TTL_S = 86_400;
const MAX_NEGATIVE_S = 300;
const DEFAULT_NEGATIVE_S = 30;
/** An upstream that fails is not asked again for every question of a loop. */
const FAILED_MS = 1_000;

export class NameLookup {
  private readonly options: LookupOptions;
  private readonly cache: AnswerCache<Found>;
  private readonly asking = new Map<string, Promise<Found>>();
  private readonly slots: Slots;
  readonly now: () => number;

  constructor(options: LookupOptions) {
    this.options = options;
    this.cache = new AnswerCache(options.cached ?? 10_000);
    this.slots = new Slots(options.underWay ?? 256, MAX_WAITING);
    this.now = options.now ?? (() => performance.now());
  }

  /** What is known already. */
  known(name: string, type: number): Found | undefined {
    return this.cache.get(`${type} ${name}`, this.now());
  }

  find(name: string, type: number): Promise<Found> {
    const key = `${type} ${name}`;
    const known = this.cache.get(key, this.now());
    if (known !== undefined) return Promise.resolve(known);
    const asked = this.asking.get(key);
    if (asked !== undefined) return asked;
    const asking = this.slots
      .run(() => this.follow(name, type))
      .catch(() => this.failed())
      .then((found) => {
        this.asking.delete(key);
        this.cache.set(key, found);
        return found;
      });
    this.asking.set(key, asking);
    return asking;
  }

  private failed(): Found {
    return { rcode: RCODE.failed, data: [], untilMs: this.now() + FAILED_MS };
  }

  private async follow(asked: string, type: number): Promise<Found> {
    const passed = new Set<string>();
    let ttl = MAX_TTL_S;
    for (let name = asked; ; ) {
      const answer = await this.ask(name, type);
      if (answer === undefined) return this.failed();
      const begin = name;
      // Along the CNAMEs that came with it.
      for (;;) {
        if (passed.has(name) || passed.size > MAX_CNAMES) return this.failed();
        passed.add(name);
        const alias = answer.records.find((record) => record.owner === name && record.type === TYPE.CNAME);
        if (alias === undefined) break;
        if (alias.target === undefined) return this.failed();
        ttl = Math.min(ttl, alias.ttl);
        name = alias.target;
      }
      const here = answer.records.filter((record) => record.owner === name && record.type === type);
      if (here.length > 0) {
        const data = [...new Map(here.map((one) => [one.data.toString('latin1'), one.data])).values()];
        return this.holds(RCODE.ok, data.slice(0, MAX_RECORDS), Math.min(ttl, ...here.map((one) => one.ttl)));
      }
      // Not even an alias, or one whose end the upstream has looked at.
      if (answer.rcode === RCODE.noName || answer.negativeTtl !== undefined || name === begin) {
        const seconds = Math.min(answer.negativeTtl ?? DEFAULT_NEGATIVE_S, MAX_NEGATIVE_S, ttl);
        return this.holds(answer.rcode, [], seconds);
      }
      passed.delete(name);
    }
  }

  private holds(rcode: number, data: readonly Buffer[], seconds: number): Found {
    return { rcode, data, untilMs: this.now() + seconds * 1000 };
  }

  /** One after the other, twice. Undefined: none has an answer. */
  private async ask(name: string, type: number): Promise<UpstreamAnswer | undefined> {
    for (let round = 0; round < ROUNDS; round++) {
      for (const server of this.options.servers.current()) {
        const answer = await askUpstream(server, name, type, this.options.limits ?? ASK_LIMITS);
        if (answer?.rcode === RCODE.ok || answer?.rcode === RCODE.noName) return answer;
      }
    }
    return undefined;
  }
}
