/**
 * A policy as the kernel looks it up: for each address range, an ordered list of entries, the first of which that fits a packet decides. The
 * kernel finds the smallest range that holds the address and nothing else, so each range also carries what the ranges around it say, after
 * its own. What fits no entry is denied.
 */
import { fail } from '../errors.ts';
import { type AddressRange, rangeHolds } from './address.ts';
import type { EffectivePolicy, NameRule, PolicyProtocol } from './policy.ts';

export interface Entry {
  /** IP protocol, or 255: each. */
  readonly protocol: number;
  readonly from: number;
  readonly to: number;
  readonly denies: boolean;
  /** Of an answered name: until then for new connections, in ns of the monotonic clock. */
  readonly expires?: bigint;
  /** Of an answered name: the tag of the rule's pattern, so that a process that comes later knows by which rule it is. */
  readonly tag?: number;
}

export interface Row {
  readonly range: Pick<AddressRange, 'bytes' | 'bits'>;
  readonly entries: readonly Entry[];
}

export const ENTRY_BYTES = 16;
export const MAX_ENTRIES = 12;
export const VALUE_BYTES = ENTRY_BYTES * MAX_ENTRIES;
export const KEY_BYTES = 20;
export const FLAG_DENIES = 1;
export const ANY_PROTOCOL = 255;

const NUMBERS: Readonly<Record<Exclude<PolicyProtocol, 'any'>, readonly number[]>> = {
  tcp: [6],
  udp: [17],
  icmp: [1, 58],
};

type Scope = Pick<NameRule, 'action' | 'protocol' | 'ports'>;

export function entriesOf(scope: Scope, more: Pick<Entry, 'expires' | 'tag'> = {}): Entry[] {
  const denies = scope.action === 'deny';
  return scope.ports.flatMap(([from, to]) => {
    const everyPort = from === 0 && to === 65535;
    const protocols =
      scope.protocol !== 'any'
        ? NUMBERS[scope.protocol]
        : everyPort
          ? [ANY_PROTOCOL]
          : [...NUMBERS.tcp, ...NUMBERS.udp];
    return protocols.map((protocol): Entry => ({ protocol, from, to, denies, ...more }));
  });
}

const EVERYWHERE: Row['range'] = { bytes: Buffer.alloc(16), bits: 0 };

/** Rows in order of their ranges. @throws RUNTIME_NETWORK_POLICY when one would be too long */
export function compileRows(policy: EffectivePolicy): Row[] {
  const own = new Map<string, { readonly range: Row['range']; readonly text: string; entries: Entry[] }>();
  const add = (range: Row['range'], text: string, entries: readonly Entry[]) => {
    const key = rowKey(range).toString('latin1');
    const found = own.get(key) ?? { range, text, entries: [] };
    own.set(key, found);
    // What denies comes first.
    found.entries = [...found.entries, ...entries].sort((a, b) => Number(b.denies) - Number(a.denies));
  };
  for (const rule of policy.addresses) add(rule.range, rule.range.text, entriesOf(rule));
  if (policy.default === 'allow') {
    const all: Entry = { protocol: ANY_PROTOCOL, from: 0, to: 65535, denies: false };
    add(EVERYWHERE, 'every address', [all]);
  }
  const sorted = [...own.values()].sort((a, b) => a.range.bytes.compare(b.range.bytes) || a.range.bits - b.range.bits);
  const around: { readonly range: Row['range']; readonly entries: readonly Entry[] }[] = [];
  return sorted.map(({ range, text, entries: mine }) => {
    while (around.length > 0 && !rangeHolds(around.at(-1)!.range, range)) around.pop();
    const entries = shortened([...mine, ...(around.at(-1)?.entries ?? [])]);
    if (entries.length > MAX_ENTRIES) {
      const problem = `${entries.length} port ranges hold for it, those of the ranges around it included; there may be ${MAX_ENTRIES}`;
      throw fail('RUNTIME_NETWORK_POLICY', { what: `rules for "${text}"`, problem });
    }
    const row = { range, entries };
    around.push(row);
    return row;
  });
}

/** Without what can never decide. */
function shortened(entries: readonly Entry[]): Entry[] {
  const kept: Entry[] = [];
  for (const entry of entries) {
    const covered = kept.some(
      (before) =>
        (before.expires === undefined || (entry.expires !== undefined && entry.expires <= before.expires)) &&
        (before.protocol === ANY_PROTOCOL || before.protocol === entry.protocol) &&
        before.from <= entry.from &&
        before.to >= entry.to,
    );
    if (!covered) kept.push(entry);
  }
  return kept;
}

/** What the smallest range around an address says. */
export function entriesAround(rows: readonly Row[], address: Buffer): readonly Entry[] {
  let found: Row | undefined;
  for (const row of rows) {
    if (rangeHolds(row.range, { bytes: address, bits: 128 }) && row.range.bits >= (found?.range.bits ?? -1))
      found = row;
  }
  return found?.entries ?? [];
}

/**
 * Of an address that a name led to: what the policy says by address, both ways, goes first. Too many to fit: then later answers open less
 * than they could.
 */
export function openedEntries(around: readonly Entry[], opened: readonly Entry[]): Entry[] {
  return shortened([...around, ...opened]).slice(0, MAX_ENTRIES);
}

export function rowKey({ bytes, bits }: Row['range']): Buffer {
  const key = Buffer.alloc(KEY_BYTES);
  key.writeUInt32LE(bits, 0);
  bytes.copy(key, 4);
  return key;
}

export function rowValue(entries: readonly Entry[]): Buffer {
  const value = Buffer.alloc(VALUE_BYTES);
  for (const [index, entry] of entries.entries()) {
    const at = index * ENTRY_BYTES;
    value.writeUInt16LE(entry.from, at);
    value.writeUInt16LE(entry.to, at + 2);
    // 0 ends the list: no rule is about protocol 0.
    value[at + 4] = entry.protocol;
    value[at + 5] = entry.denies ? FLAG_DENIES : 0;
    value.writeUInt16LE(entry.tag ?? 0, at + 6);
    value.writeBigUInt64LE(entry.expires ?? 0n, at + 8);
  }
  return value;
}

export function parseRowValue(value: Buffer): Entry[] {
  const entries: Entry[] = [];
  for (let at = 0; at < value.length && value[at + 4] !== 0; at += ENTRY_BYTES) {
    const [tag, expires] = [value.readUInt16LE(at + 6), value.readBigUInt64LE(at + 8)];
    entries.push({
      protocol: value[at + 4]!,
      from: value.readUInt16LE(at),
      to: value.readUInt16LE(at + 2),
      denies: (value[at + 5]! & FLAG_DENIES) !== 0,
      ...(tag === 0 ? {} : { tag, expires }),
    });
  }
  return entries;
}

/** 1 to 65535: two patterns of a policy that have the same one are told apart by nobody. */
export function tagOf(pattern: string): number {
  let hash = 0x811c9dc5;
  for (const byte of Buffer.from(pattern)) hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  return (hash >>> 16) ^ (hash & 0xffff) || 1;
}
