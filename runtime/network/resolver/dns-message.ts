/**
 * Messages of the DNS, as far as the resolver needs them: questions of sandboxes and answers to them, questions to an upstream and its
 * answers. Bytes of strangers: whatever they are, a value comes back, never an exception, and no more work than they have bytes.
 *
 * Own code: the name is what the policy decides on, so it has to be read in exactly one way (see dns-name.ts), and of an
 * answer just four kinds of records are looked at. A library for all of the DNS (dns-packet) decodes labels as UTF-8, cannot tell a dot
 * inside of a label from one between two, and decodes each kind of record eagerly, for more code than is here.
 */
import { readName, wireName } from './dns-name.ts';

export const TYPE = {
  A: 1,
  NS: 2,
  CNAME: 5,
  SOA: 6,
  NULL: 10,
  PTR: 12,
  MX: 15,
  TXT: 16,
  AAAA: 28,
  SRV: 33,
  OPT: 41,
  SVCB: 64,
  HTTPS: 65,
  AXFR: 252,
  ANY: 255,
} as const;
export const CLASS_IN = 1;
export const RCODE = {
  ok: 0,
  malformed: 1,
  failed: 2,
  noName: 3,
  notImplemented: 4,
  refused: 5,
  badVersion: 16,
} as const;

const HEADER_BYTES = 12;
/** What every client takes over UDP, and what passes every network in one piece. */
const PLAIN_UDP_BYTES = 512;
export const UDP_BYTES = 1232;
const QR = 0x8000;
const TRUNCATED = 0x0200;
const RECURSION_DESIRED = 0x0100;
const RECURSION_AVAILABLE = 0x0080;

export function typeName(type: number): string {
  return Object.entries(TYPE).find(([, number]) => number === type)?.[0] ?? `TYPE${type}`;
}

export interface Query {
  readonly id: number;
  readonly recursion: boolean;
  /** The question as it came, letters and all: it goes back so. */
  readonly question: Buffer;
  readonly name: string | undefined;
  readonly type: number;
  readonly class: number;
  /** Undefined: without EDNS. */
  readonly edns: { readonly version: number; readonly udpBytes: number } | undefined;
}

/** `error`: what to answer in place of it. Undefined: no answer at all, which is for what is itself an answer, or too short. */
export function parseQuery(message: Buffer): Query | { readonly error: Buffer } | undefined {
  if (message.length < HEADER_BYTES) return undefined;
  const flags = message.readUInt16BE(2);
  if ((flags & QR) !== 0) return undefined;
  const bare = (rcode: number) => {
    const header = Buffer.alloc(HEADER_BYTES);
    message.copy(header, 0, 0, 2);
    header.writeUInt16BE(QR | (flags & 0x7900) | rcode, 2);
    return { error: header };
  };
  if ((flags & 0x7800) !== 0) return bare(RCODE.notImplemented);
  const counts = [4, 6, 8, 10].map((at) => message.readUInt16BE(at));
  if (counts[0] !== 1 || counts[1] !== 0 || counts[2] !== 0 || counts[3]! > 2) return bare(RCODE.malformed);
  const name = readName(message, HEADER_BYTES, false);
  if (name === undefined || name.end + 4 > message.length) return bare(RCODE.malformed);
  let edns: Query['edns'];
  let at = name.end + 4;
  for (let n = 0; n < counts[3]!; n++) {
    const record = readRecord(message, at);
    if (record === undefined) return bare(RCODE.malformed);
    at = record.end;
    if (record.type !== TYPE.OPT) continue;
    if (edns !== undefined) return bare(RCODE.malformed);
    edns = { udpBytes: record.class, version: (record.ttl >>> 16) & 0xff };
  }
  return {
    id: message.readUInt16BE(0),
    recursion: (flags & RECURSION_DESIRED) !== 0,
    question: Buffer.from(message.subarray(HEADER_BYTES, name.end + 4)),
    name: name.text,
    type: message.readUInt16BE(name.end),
    class: message.readUInt16BE(name.end + 2),
    edns,
  };
}

export interface AnswerRecord {
  readonly type: number;
  readonly ttl: number;
  readonly data: Buffer;
}

/** @param limitBytes Beyond it the answer says that it is cut short, and holds no record: it is asked again over TCP. */
export function answerTo(query: Query, rcode: number, records: readonly AnswerRecord[], limitBytes: number): Buffer {
  const edns = query.edns === undefined ? [] : [optRecord(rcode >> 4)];
  const build = (flags: number, list: readonly AnswerRecord[]) => {
    const header = Buffer.alloc(HEADER_BYTES);
    const recursion = query.recursion ? RECURSION_DESIRED : 0;
    header.writeUInt16BE(query.id, 0);
    header.writeUInt16BE(QR | recursion | RECURSION_AVAILABLE | flags | (rcode & 15), 2);
    header.writeUInt16BE(1, 4);
    header.writeUInt16BE(list.length, 6);
    header.writeUInt16BE(edns.length, 10);
    return Buffer.concat([header, query.question, ...list.map(recordBytes), ...edns]);
  };
  const whole = build(0, records);
  return whole.length <= limitBytes ? whole : build(TRUNCATED, []);
}

/** What a client takes over UDP. */
export function udpLimit({ edns }: Query): number {
  return edns === undefined ? PLAIN_UDP_BYTES : Math.min(UDP_BYTES, Math.max(PLAIN_UDP_BYTES, edns.udpBytes));
}

/** Owned by the name of the question. */
function recordBytes({ type, ttl, data }: AnswerRecord): Buffer {
  const head = Buffer.alloc(12);
  head.writeUInt16BE(0xc000 | HEADER_BYTES, 0);
  head.writeUInt16BE(type, 2);
  head.writeUInt16BE(CLASS_IN, 4);
  head.writeUInt32BE(ttl, 6);
  head.writeUInt16BE(data.length, 10);
  return Buffer.concat([head, data]);
}

function optRecord(extendedRcode: number): Buffer {
  const record = Buffer.alloc(11);
  record.writeUInt16BE(TYPE.OPT, 1);
  record.writeUInt16BE(UDP_BYTES, 3);
  record.writeUInt8(extendedRcode, 5);
  return record;
}

/** A question to an upstream. @param spelled The name, its letters large and small as the answer has to repeat them. */
export function upstreamQuery(id: number, spelled: string, type: number): Buffer {
  const header = Buffer.alloc(HEADER_BYTES);
  header.writeUInt16BE(id, 0);
  header.writeUInt16BE(RECURSION_DESIRED, 2);
  header.writeUInt16BE(1, 4);
  header.writeUInt16BE(1, 10);
  const tail = Buffer.alloc(4);
  tail.writeUInt16BE(type, 0);
  tail.writeUInt16BE(CLASS_IN, 2);
  return Buffer.concat([header, wireName(spelled), tail, optRecord(0)]);
}

export interface UpstreamRecord {
  readonly owner: string;
  readonly type: number;
  readonly ttl: number;
  readonly data: Buffer;
  /** Of a CNAME; undefined when it is none that we take. */
  readonly target: string | undefined;
}

export interface UpstreamAnswer {
  readonly rcode: number;
  readonly truncated: boolean;
  readonly records: readonly UpstreamRecord[];
  /** How long it holds that there is nothing, in seconds. */
  readonly negativeTtl: number | undefined;
}

/**
 * Undefined: this is no answer to `query` (made by `upstreamQuery`); perhaps somebody wants us to take it for one.
 * @param exact The letters of the name have to be as large and small as they were asked.
 */
export function parseUpstreamAnswer(query: Buffer, message: Buffer, exact: boolean): UpstreamAnswer | undefined {
  if (message.length < HEADER_BYTES || message.readUInt16BE(0) !== query.readUInt16BE(0)) return undefined;
  const flags = message.readUInt16BE(2);
  if ((flags & (QR | 0x7800)) !== QR) return undefined;
  const questionEnd = query.length - optRecord(0).length;
  const [asked, repeated] = [query, message].map((of) => of.toString('latin1', HEADER_BYTES, questionEnd));
  const same = asked === repeated || (!exact && asked!.toLowerCase() === repeated!.toLowerCase());
  if (message.readUInt16BE(4) !== 1 || !same) return undefined;
  const rcode = flags & 15;
  const truncated = (flags & TRUNCATED) !== 0;
  if (truncated) return { rcode, truncated, records: [], negativeTtl: undefined };
  const [answers, authorities] = [message.readUInt16BE(6), message.readUInt16BE(8)];
  const records: UpstreamRecord[] = [];
  let negativeTtl: number | undefined;
  let at = questionEnd;
  for (let n = 0; n < answers + authorities; n++) {
    const record = readRecord(message, at);
    if (record === undefined) return undefined;
    at = record.end;
    const { owner, type, ttl, data, dataAt } = record;
    if (record.class !== CLASS_IN || owner === undefined) continue;
    if (n >= answers) {
      // The last of its seven fields.
      if (type === TYPE.SOA && data.length >= 4) negativeTtl = Math.min(ttl, data.readUInt32BE(data.length - 4));
      continue;
    }
    const target = type === TYPE.CNAME ? readName(message, dataAt)?.text : undefined;
    records.push({ owner, type, ttl, data: dataOf(message, type, data, dataAt), target });
  }
  return { rcode, truncated, records, negativeTtl };
}

/** Without compression. */
function dataOf(message: Buffer, type: number, data: Buffer, at: number): Buffer {
  if (type === TYPE.MX && data.length > 2) {
    const name = readName(message, at + 2)?.text;
    if (name !== undefined) return Buffer.concat([data.subarray(0, 2), wireName(name)]);
  }
  return Buffer.from(data);
}

function readRecord(message: Buffer, at: number) {
  const owner = readName(message, at);
  if (owner === undefined || owner.end + 10 > message.length) return undefined;
  const fixed = owner.end;
  const dataAt = fixed + 10;
  const end = dataAt + message.readUInt16BE(fixed + 8);
  if (end > message.length) return undefined;
  const ttl = message.readUInt32BE(fixed + 4);
  return {
    owner: owner.text,
    type: message.readUInt16BE(fixed),
    class: message.readUInt16BE(fixed + 2),
    // With its highest bit it means none (RFC 2181); of an OPT it is flags.
    ttl: message.readUInt16BE(fixed) !== TYPE.OPT && ttl > 0x7fffffff ? 0 : ttl,
    data: message.subarray(dataAt, end),
    dataAt,
    end,
  };
}
