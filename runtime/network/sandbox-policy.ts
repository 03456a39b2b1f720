/**
 * One sandbox's policy, and what answers of the resolver have opened under it. Known here by name, so that a new policy keeps exactly what it
 * allows as well: connections go on, and what it has not is closed with the same step.
 */

import type { AddressRange } from './address.ts';
import { addressBytes, rangeHolds } from './address.ts';
import { decideName } from './name-decision.ts';
import type { SandboxNames } from './opened-addresses.ts';
import { type EffectivePolicy, effectivePolicy, type NetworkPolicy } from './policy.ts';
import { compileRows, type Entry, entriesAround, entriesOf, openedEntries, type Row, tagOf } from './rule-table.ts';

/** Of one sandbox. Those that have expired longest go first, and with them connections that are older. */
const MAX_OPENED = 4096;

export class SandboxPolicy {
  readonly names: SandboxNames;
  private readonly effective: EffectivePolicy;
  private readonly rows: readonly Row[];
  private readonly closed: readonly AddressRange[];
  /** By address, as latin1 of its bytes: names, and until when each has opened it (ns, monotonic clock). */
  private readonly opened = new Map<string, Map<string, bigint>>();

  /** @param rules Without services. @throws RUNTIME_NETWORK_POLICY */
  constructor(rules: NetworkPolicy, closed: readonly AddressRange[]) {
    this.effective = effectivePolicy(rules);
    this.rows = compileRows(this.effective);
    this.closed = closed;
    this.names = { default: rules.default, rules: this.effective.names };
  }

  /** All that holds now: for a table that begins. */
  table(): Row[] {
    const opened = [...this.opened].flatMap(([key, names]) => this.openedRow(Buffer.from(key, 'latin1'), names) ?? []);
    return [...this.rows, ...opened];
  }

  /** What a policy before this one, or a process before this one, had opened. */
  takeOver(before: SandboxPolicy): void {
    for (const [key, names] of before.opened) {
      const allowed = [...names].filter(([name]) => decideName(this.effective.names, name).action === 'allow');
      if (allowed.length > 0) this.opened.set(key, new Map(allowed));
    }
  }

  /** Of a table in the kernel that was made of these rules or of others: what is opened by a name's pattern stays if that is here too. */
  takeOverRows(rows: readonly { readonly address: Buffer; readonly entries: readonly Entry[] }[]): void {
    const patterns = new Map<number, Set<string>>();
    for (const { pattern } of this.effective.names) {
      const tag = tagOf(pattern);
      patterns.set(tag, (patterns.get(tag) ?? new Set()).add(pattern));
    }
    for (const { address, entries } of rows) {
      const names = new Map<string, bigint>();
      for (const { tag, expires } of entries) {
        const [pattern, another] = patterns.get(tag ?? 0) ?? [];
        if (pattern !== undefined && another === undefined && expires !== undefined) names.set(pattern, expires);
      }
      if (names.size > 0) this.opened.set(address.toString('latin1'), names);
    }
  }

  /**
   * Whether a name may lead to an address, and the row that opens it.
   * @returns Undefined: it may not. Without a row: nothing has to be opened.
   */
  open(name: string, address: string, expires: bigint): { readonly row?: Row } | undefined {
    const bytes = addressBytes(address);
    const whole = bytes && { bytes, bits: 128 };
    if (whole === undefined || this.closed.some((range) => rangeHolds(range, whole))) return undefined;
    const { action } = decideName(this.effective.names, name);
    if ((action ?? this.effective.default) === 'deny') return undefined;
    const key = whole.bytes.toString('latin1');
    const names = new Map(this.opened.get(key));
    names.set(name, expires);
    const row = this.openedRow(whole.bytes, names);
    if (row === undefined) {
      const some = entriesAround(this.rows, whole.bytes).some(({ denies }) => !denies);
      return some ? {} : undefined;
    }
    this.opened.delete(key);
    this.opened.set(key, names);
    return { row };
  }

  /** What is too much: its rows go, too. */
  surplus(): Row['range'][] {
    if (this.opened.size <= MAX_OPENED) return [];
    const latest = (names: ReadonlyMap<string, bigint>) => [...names.values()].reduce((a, b) => (a > b ? a : b), 0n);
    const order = [...this.opened].map(([key, names]) => ({ key, until: latest(names) }));
    order.sort((a, b) => Number(a.until - b.until));
    // Some more, so that it is not looked for each time.
    const gone = order.slice(0, this.opened.size - MAX_OPENED + MAX_OPENED / 8);
    for (const { key } of gone) this.opened.delete(key);
    return gone.map(({ key }) => ({ bytes: Buffer.from(key, 'latin1'), bits: 128 }));
  }

  /** What would hold for an address if no name had led to it; undefined: no row of its own. */
  staticRow(range: Row['range']): Row | undefined {
    return this.rows.find((row) => row.range.bits === 128 && row.range.bytes.equals(range.bytes));
  }

  get openedCount(): number {
    return this.opened.size;
  }

  nameOf(address: Buffer): string | undefined {
    return [...(this.opened.get(address.toString('latin1'))?.keys() ?? [])].at(-1);
  }

  private openedRow(bytes: Buffer, names: ReadonlyMap<string, bigint>): Row | undefined {
    // The latest first: where there are too many to fit, it is they that count.
    const byExpiry = [...names].sort(([, a], [, b]) => (a < b ? 1 : a > b ? -1 : 0));
    const opened = byExpiry.flatMap(([name, expires]) => {
      return decideName(this.effective.names, name).rules.flatMap((rule) =>
        entriesOf(rule, { expires, tag: tagOf(rule.pattern) }),
      );
    });
    const entries = openedEntries(entriesAround(this.rows, bytes), opened);
    return entries.some(({ tag }) => tag !== undefined) ? { range: { bytes, bits: 128 }, entries } : undefined;
  }
}
