/**
 * The program at the sandboxes' links and its tables, as this process holds them. Tables and program have names in a bpf file system of the
 * node's own, so that the process that comes next goes on with them; at the links the kernel itself holds the program. So when this process
 * dies everything stays as it is: what is allowed stays allowed, addresses of names expire, the rest is denied.
 *
 * A change of policy is a new table in place of the old one: a packet is judged by the one or by the other.
 */
import { createHash } from 'node:crypto';
import { closeSync, mkdirSync, readdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { bpf, mount, mountsAt, umount } from '#linux';
import { type AddressRange, addressBytes } from './address.ts';
import { type DeniedPacket, parseEvent } from './denied-packet.ts';
import { egressProgram, type ProgramMaps, STATE } from './egress-program.ts';
import { RingReader } from './ring-reader.ts';
import { type Entry, KEY_BYTES, parseRowValue, type Row, rowKey, rowValue, VALUE_BYTES } from './rule-table.ts';

const { hash, hashOfMaps, lpmTrie, ringBuffer } = bpf.BPF_MAP;

/** Links, and so sandboxes, of a node. */
const MAX_LINKS = 65_536;
/** Ranges and opened addresses of one sandbox. Memory is taken as they come. */
const MAX_ROWS = 16_384;
const MAX_CLOSED = 4096;
const RING_BYTES = 1 << 18;

export interface LinkState {
  /** Of the sandbox. */
  readonly number: number;
  readonly ipv4: string;
  readonly ipv6: string;
  readonly gateway4: string;
  readonly gateway6: string;
  /** Of its network: its guest asks for its address, and for the gateway's. */
  readonly mask4?: Buffer;
}

export interface LinkCounters {
  readonly allowedPackets: number;
  readonly allowedBytes: number;
  readonly deniedPackets: number;
  readonly deniedBytes: number;
  /** Denied, and not in the log because there were too many. */
  readonly unloggedPackets: number;
}

export class PacketFilter {
  /** Descriptor of the program. */
  readonly program: number;
  private readonly folder: string;
  private readonly maps: ProgramMaps;
  private readonly ring: RingReader;
  /** By sandbox: tables that are about to take the place of those that hold. */
  private readonly coming = new Map<number, number>();

  private constructor(folder: string, maps: ProgramMaps, program: number) {
    this.folder = folder;
    this.maps = maps;
    this.program = program;
    this.ring = new RingReader(maps.ring, RING_BYTES);
  }

  /** With what a process before this one left, if it was of the same make. @throws SyscallError */
  static open(folder: string): PacketFilter {
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    if (mountsAt(folder).length === 0) mount('bpf', folder, 'bpf', 0);
    const pins = join(folder, programVersion());
    mkdirSync(pins, { recursive: true });
    const maps = {
      links: pinned(pins, 'links', () => newMap('links', hash, 4, STATE.sizeBytes, MAX_LINKS)),
      policies: pinned(pins, 'policies', () => {
        const inner = newTable();
        try {
          return bpf.createMap({ ...sizes(4, 4, MAX_LINKS), name: 'dsec_policies', type: hashOfMaps, inner });
        } finally {
          closeSync(inner);
        }
      }),
      closed: pinned(pins, 'closed', () => newMap('closed', lpmTrie, KEY_BYTES, 4, MAX_CLOSED)),
      ring: pinned(pins, 'ring', () => newMap('ring', ringBuffer, 0, 0, RING_BYTES)),
    };
    const program = pinned(pins, 'program', () =>
      bpf.loadProgram({ name: 'dsec_egress', type: bpf.BPF_PROGRAM.schedulerClass, code: egressProgram(maps) }),
    );
    return new PacketFilter(folder, maps, program);
  }

  /** What is at links stays, and so do the tables. */
  close(): void {
    this.ring.close();
    for (const fd of [...Object.values(this.maps), this.program]) closeSync(fd);
  }

  /** Of another make: once no link has its program any more. */
  forgetOthers(): void {
    for (const entry of readdirSync(this.folder, { withFileTypes: true })) {
      const isOther = entry.isDirectory() && entry.name !== programVersion();
      if (isOther) rmSync(join(this.folder, entry.name), { recursive: true, force: true });
    }
  }

  /** Ranges that no rule opens, instead of those before. */
  closeRanges(ranges: readonly AddressRange[]): void {
    const wanted = new Map(ranges.map((range) => [rowKey(range).toString('hex'), rowKey(range)]));
    for (const key of wanted.values()) bpf.updateMap(this.maps.closed, key, Buffer.alloc(4));
    const stale = [...bpf.mapKeys(this.maps.closed, KEY_BYTES)].filter((key) => !wanted.has(key.toString('hex')));
    for (const key of stale) bpf.deleteFromMap(this.maps.closed, key);
  }

  /** Numbers of the links that are known. */
  links(): number[] {
    return [...bpf.mapKeys(this.maps.links, 4)].map((key) => key.readUInt32LE(0));
  }

  /** Counters start at 0, unless it is known already. */
  addLink(link: number, { number, ipv4, ipv6, gateway4, gateway6, mask4 }: LinkState): void {
    if (bpf.lookUp(this.maps.links, u32(link), STATE.sizeBytes) !== undefined) return;
    const state = Buffer.alloc(STATE.sizeBytes);
    addressBytes(ipv4)!.copy(state, STATE.own4);
    addressBytes(ipv6)!.copy(state, STATE.own6);
    addressBytes(gateway4)!.copy(state, STATE.gateway4);
    addressBytes(gateway6)!.copy(state, STATE.gateway6);
    state.writeUInt32LE(number, STATE.number);
    mask4?.copy(state, STATE.mask4);
    bpf.updateMap(this.maps.links, u32(link), state);
  }

  removeLink(link: number): void {
    bpf.deleteFromMap(this.maps.links, u32(link));
  }

  counters(link: number): LinkCounters | undefined {
    const state = bpf.lookUp(this.maps.links, u32(link), STATE.sizeBytes);
    if (state === undefined) return undefined;
    const at = (offset: number) => Number(state.readBigUInt64LE(offset));
    return {
      allowedPackets: at(STATE.passed),
      allowedBytes: at(STATE.passedBytes),
      deniedPackets: at(STATE.denied),
      deniedBytes: at(STATE.deniedBytes),
      unloggedPackets: at(STATE.untold),
    };
  }

  /** In place of the table before. When this resolves, no packet is judged by that one any more. One at a time for a sandbox. */
  async setRows(sandbox: number, rows: readonly Row[]): Promise<void> {
    const table = newTable();
    try {
      if (rows.length > 0) {
        const keys = Buffer.concat(rows.map(({ range }) => rowKey(range)));
        const values = Buffer.concat(rows.map(({ entries }) => rowValue(entries)));
        bpf.updateMapBatch(table, keys, values, rows.length);
      }
      this.coming.set(sandbox, table);
      await bpf.updateMapInPool(this.maps.policies, u32(sandbox), u32(table));
    } finally {
      this.coming.delete(sandbox);
      closeSync(table);
    }
  }

  async removeRows(sandbox: number): Promise<void> {
    await bpf.deleteFromMapInPool(this.maps.policies, u32(sandbox));
  }

  /** Sandboxes that have a table. */
  sandboxes(): number[] {
    return [...bpf.mapKeys(this.maps.policies, 4)].map((key) => key.readUInt32LE(0));
  }

  /** One row of the table that holds now, and of the one that comes. False: there is none. */
  setRow(sandbox: number, { range, entries }: Row): boolean {
    const coming = this.coming.get(sandbox);
    if (coming !== undefined) bpf.updateMap(coming, rowKey(range), rowValue(entries));
    return this.withTable(sandbox, (table) => bpf.updateMap(table, rowKey(range), rowValue(entries))) !== undefined;
  }

  removeRow(sandbox: number, range: Row['range']): void {
    this.withTable(sandbox, (table) => bpf.deleteFromMap(table, rowKey(range)));
  }

  /** What a process before this one opened. */
  openedRows(sandbox: number): { readonly address: Buffer; readonly entries: readonly Entry[] }[] {
    const found: { address: Buffer; entries: Entry[] }[] = [];
    this.withTable(sandbox, (table) => {
      for (const key of bpf.mapKeys(table, KEY_BYTES)) {
        const value = bpf.lookUp(table, key, VALUE_BYTES);
        const entries = value === undefined ? [] : parseRowValue(value).filter(({ tag }) => tag !== undefined);
        if (entries.length > 0) found.push({ address: key.subarray(4), entries });
      }
    });
    return found;
  }

  /** What was denied since the last call. */
  denied(): DeniedPacket[] {
    return this.ring.take().map(parseEvent);
  }

  private withTable<T>(sandbox: number, work: (table: number) => T): { readonly result: T } | undefined {
    const id = bpf.lookUp(this.maps.policies, u32(sandbox), 4)?.readUInt32LE(0);
    const table = id === undefined ? undefined : bpf.openMapById(id);
    if (table === undefined) return undefined;
    try {
      return { result: work(table) };
    } finally {
      closeSync(table);
    }
  }
}

/** All names: for a node that has no sandbox with a link any more. */
export function removePacketFilter(folder: string): void {
  while (mountsAt(folder).length > 0) umount(folder);
  rmSync(folder, { recursive: true, force: true });
}

let version: string | undefined;

/** Of the program and, since their layout is in it, of the tables. */
function programVersion(): string {
  const code = () => egressProgram({ links: 0, policies: 0, closed: 0, ring: 0 });
  version ??= createHash('sha256').update(code()).digest('hex').slice(0, 16);
  return version;
}

function pinned(folder: string, name: string, make: () => number): number {
  const path = join(folder, name);
  const found = bpf.pinnedObject(path);
  if (found !== undefined) return found;
  const fd = make();
  bpf.pinObject(fd, path);
  return fd;
}

function sizes(keyBytes: number, valueBytes: number, entries: number) {
  return { keyBytes, valueBytes, entries, flags: bpf.BPF_NO_PREALLOC };
}

function newMap(
  name: string,
  type: bpf.MapSpec['type'],
  keyBytes: number,
  valueBytes: number,
  entries: number,
): number {
  const flags = type === ringBuffer ? 0 : bpf.BPF_NO_PREALLOC;
  return bpf.createMap({ name: `dsec_${name}`, type, keyBytes, valueBytes, entries, flags });
}

function newTable(): number {
  return newMap('rules', lpmTrie, KEY_BYTES, VALUE_BYTES, MAX_ROWS);
}

function u32(value: number): Buffer {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value, 0);
  return bytes;
}
