/**
 * What one sandbox gets for a question: an answer to a name that its policy allows, with the addresses opened before it goes out, and
 * a refusal to all else, which never leaves this machine.
 *
 * - Addresses are given under the asked name itself, without the CNAMEs between: a client that asked for those would be refused.
 * - A DNS tunnel needs names or types of its own. Names that are not allowed go nowhere; of types there are A and AAAA alone, unless the policy
 *   allows all that it does not name; where a rule leaves a part of the name free that part is bounded, and so is how many new ones are asked a second.
 */
import { Slots } from '#base';
import type { OpenedAddresses, SandboxNames } from '../opened-addresses.ts';
import { type AnswerRecord, answerTo, CLASS_IN, parseQuery, type Query, RCODE, TYPE, typeName } from './dns-message.ts';
import type { Found, NameLookup } from './name-lookup.ts';
import { type NameMatch, NameRules } from './name-rules.ts';
import { TokenBucket } from './token-bucket.ts';
import { addressText, mayBeOpened } from './unopened-addresses.ts';

export type DeniedReason =
  /** The policy does not have the name. */
  | 'name'
  | 'type'
  /** What the rule leaves free is too long. */
  | 'length'
  /** Too many questions, or too many new names. */
  | 'rate'
  /** It leads nowhere but to addresses that stay closed. */
  | 'address';

export interface DeniedName {
  /** Its record's id. */
  readonly sandbox: string;
  /** Undefined: no name that a rule could have. */
  readonly name: string | undefined;
  /** `A`, `TXT`, `TYPE4711`. */
  readonly type: string;
  readonly reason: DeniedReason;
  /** Where the question came from: says which program it was, while that has it open. */
  readonly from: { readonly address: string; readonly port: number };
}

export interface AnswerLimits {
  readonly perSecond: number;
  readonly burst: number;
  /** New names where a part is free. */
  readonly newPerSecond: number;
  readonly newBurst: number;
  /** Bytes of the free part. */
  readonly freeBytes: number;
  /** Questions to upstreams under way, and those that wait for that. */
  readonly underWay: number;
  readonly waiting: number;
  /** An address stays open at least and at most so long after it was told. */
  readonly leastSeconds: number;
  readonly mostSeconds: number;
}

export const ANSWER_LIMITS: AnswerLimits = {
  perSecond: 500,
  burst: 2_000,
  newPerSecond: 20,
  newBurst: 200,
  freeBytes: 100,
  underWay: 32,
  waiting: 512,
  leastSeconds: 60,
  mostSeconds: 3_600,
};

export interface AnswerParts {
  readonly lookup: NameLookup;
  readonly opened: OpenedAddresses;
  readonly denied: (denied: DeniedName) => void;
  readonly limits: AnswerLimits;
}

type From = DeniedName['from'];

/** Answered where nothing has to be closed: whoever may send to any address needs no tunnel. */
const OPEN_TYPES: ReadonlySet<number> = new Set([TYPE.MX, TYPE.SRV, TYPE.TXT]);
/** Whoever keeps an answer for all of its time connects a moment later. */
const GRACE_SECONDS = 10;

export class SandboxAnswers {
  private readonly sandbox: string;
  private readonly parts: AnswerParts;
  private readonly isOpen: boolean;
  private readonly rules: NameRules;
  private readonly questions: TokenBucket;
  private readonly fresh: TokenBucket;
  private readonly asking: Slots;

  constructor(sandbox: string, names: SandboxNames, parts: AnswerParts) {
    this.sandbox = sandbox;
    this.parts = parts;
    this.isOpen = names.default === 'allow';
    this.rules = new NameRules(names);
    const { perSecond, burst, newPerSecond, newBurst } = parts.limits;
    this.questions = new TokenBucket(perSecond, burst);
    this.fresh = new TokenBucket(newPerSecond, newBurst);
    this.asking = new Slots(parts.limits.underWay, parts.limits.waiting);
  }

  /**
   * @param limitBytes Of the answer, by the query.
   * @param holds Whether the policy is still this one: asked again when an upstream has answered.
   * @returns Undefined: no answer. Never throws.
   */
  async answer(
    message: Buffer,
    from: From,
    limitBytes: (query: Query) => number,
    holds: () => boolean,
  ): Promise<Buffer | undefined> {
    const inTime = this.questions.take();
    const query = parseQuery(message);
    if (query === undefined) return undefined;
    if ('error' in query) return inTime ? query.error : undefined;
    const deny = (reason: DeniedReason) => {
      const { name, type } = query;
      this.parts.denied({ sandbox: this.sandbox, name, type: typeName(type), reason, from });
      return { rcode: RCODE.refused, records: [] };
    };
    if (!inTime) return void deny('rate');
    const { rcode, records } = await this.decide(query, deny, holds).catch(() => FAILED);
    return answerTo(query, rcode, records, limitBytes(query));
  }

  private async decide(query: Query, deny: (reason: DeniedReason) => Told, holds: () => boolean): Promise<Told> {
    const { name, type, edns } = query;
    if (edns !== undefined && edns.version !== 0) return { rcode: RCODE.badVersion, records: [] };
    if (name === undefined || query.class !== CLASS_IN) return deny('name');
    const match = this.rules.match(name);
    if (!match.allowed) return deny('name');
    // Asked beside A and AAAA: without any, clients go on.
    if (type === TYPE.HTTPS || type === TYPE.SVCB) return NOTHING;
    const isAddress = type === TYPE.A || type === TYPE.AAAA;
    if (!isAddress && !(this.isOpen && OPEN_TYPES.has(type))) return deny('type');
    let found = this.parts.lookup.known(name, type);
    if (found === undefined) {
      const tooMuch = this.tooMuch(match);
      if (tooMuch !== undefined) return deny(tooMuch);
      found = await this.asking.run(() => this.parts.lookup.find(name, type));
      // It is asked again, and by the rules that are now.
      if (!holds()) return FAILED;
    }
    return isAddress ? this.open(name, type, match, found, deny) : this.told(type, found);
  }

  private tooMuch({ free }: NameMatch): DeniedReason | undefined {
    if (free === undefined || this.isOpen) return undefined;
    if (free.length > this.parts.limits.freeBytes) return 'length';
    return this.fresh.take() ? undefined : 'rate';
  }

  private told(type: number, { rcode, data, untilMs }: Found): Told {
    return { rcode, records: data.map((one) => ({ type, ttl: this.secondsTo(untilMs), data: one })) };
  }

  private open(name: string, type: number, match: NameMatch, found: Found, deny: (reason: DeniedReason) => Told): Told {
    if (found.data.length === 0) return { rcode: found.rcode, records: [] };
    const { leastSeconds, mostSeconds } = this.parts.limits;
    const left = this.secondsTo(found.untilMs);
    const seconds = Math.min(Math.max(left + GRACE_SECONDS, leastSeconds), mostSeconds);
    const byAddress = new Map<string, Buffer>();
    for (const data of found.data) {
      const address = data.length === (type === TYPE.A ? 4 : 16) ? addressText(data) : undefined;
      if (address !== undefined && mayBeOpened(address, match.inside)) byAddress.set(address, data);
    }
    const opened = this.parts.opened.open(this.sandbox, name, [...byAddress.keys()], seconds);
    const ttl = Math.min(left, seconds - GRACE_SECONDS);
    const records = opened.flatMap((address) => {
      const data = byAddress.get(address);
      return data === undefined ? [] : [{ type, ttl, data }];
    });
    return records.length === 0 ? deny('address') : { rcode: RCODE.ok, records };
  }

  private secondsTo(untilMs: number): number {
    return Math.max(0, Math.ceil((untilMs - this.parts.lookup.now()) / 1000));
  }
}

interface Told {
  readonly rcode: number;
  readonly records: readonly AnswerRecord[];
}

const FAILED: Told = { rcode: RCODE.failed, records: [] };
const NOTHING: Told = { rcode: RCODE.ok, records: [] };
