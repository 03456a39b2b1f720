/** What a guest is told to be, and what can be asked of it afterwards: written as runtime/agent/src/guest/order.rs and work.rs read it. */
import { randomBytes } from 'node:crypto';
import { PayloadReader, PayloadWriter } from '../../backend/agent-wire.ts';

export interface GuestLayer {
  /** Names of drives (`pmemN`, or the id of a blk drive): the metadata image's, then those of its data, in slot order. */
  readonly devices: readonly string[];
  /** Read in place. */
  readonly dax: boolean;
}

export interface GuestDisk {
  readonly device: string;
  readonly kind: string;
  /** Absolute, in the sandbox's root. */
  readonly target: string;
  readonly options?: string;
}

/** For the guest's kernel: rtnetlink. */
export interface GuestMessage {
  readonly type: number;
  readonly flags?: number;
  readonly ignore?: readonly number[];
  readonly payload: Buffer;
}

export interface GuestOrder {
  /** Files of the archive's folder `modules`, in order. */
  readonly modules: readonly string[];
  readonly hostname: string;
  /** Bottom first. */
  readonly layers: readonly GuestLayer[];
  readonly upper: string;
  readonly disks?: readonly GuestDisk[];
  /** Shown in the root. */
  readonly files?: readonly { readonly path: string; readonly content: string }[];
  readonly network?: readonly GuestMessage[];
  /** Of the group that all its commands are in. */
  readonly limits?: readonly { readonly file: string; readonly value: string }[];
  readonly writes?: readonly { readonly path: string; readonly value: string }[];
  /** 0: without end. */
  readonly lifetimeMs: number;
}

const ENTROPY_BYTES = 64;
const NS_PER_MS = 1_000_000n;

export function orderBytes(order: GuestOrder): Buffer {
  const out = new PayloadWriter();
  const pairs = (list: readonly (readonly [string, string])[]) =>
    out.list(list, ([name, value]) => out.bytes(name).bytes(value));
  out.list(order.modules, (name) => out.bytes(name)).bytes(order.hostname);
  out.list(order.layers, ({ devices, dax }) => out.list(devices, (name) => out.bytes(name)).u8(dax ? 1 : 0));
  out.bytes(order.upper);
  out.list(order.disks ?? [], ({ device, kind, target, options = '' }) =>
    out.bytes(device).bytes(kind).bytes(target).bytes(options),
  );
  pairs((order.files ?? []).map(({ path, content }) => [path, content]));
  messages(out, order.network ?? []);
  pairs((order.limits ?? []).map(({ file, value }) => [file, value]));
  pairs((order.writes ?? []).map(({ path, value }) => [path, value]));
  out.u64(nowNs()).bytes(randomBytes(ENTROPY_BYTES));
  return out.u64(BigInt(Math.max(0, Math.round(order.lifetimeMs)))).done();
}

function nowNs(): bigint {
  return BigInt(Date.now()) * NS_PER_MS;
}

function messages(out: PayloadWriter, list: readonly GuestMessage[]): void {
  out.list(list, ({ type, flags = 0, ignore = [], payload }) =>
    out
      .u16(type)
      .u16(flags)
      .list(ignore, (errno) => out.u32(errno))
      .bytes(payload),
  );
}

const WORK = {
  read: 1,
  write: 2,
  removeFolder: 3,
  killOthers: 4,
  clock: 5,
  entropy: 6,
  freeze: 7,
  thaw: 8,
  network: 9,
  hostName: 10,
  powerOff: 11,
  modules: 12,
} as const;

const asked = (work: keyof typeof WORK) => new PayloadWriter().u8(WORK[work]);

/** Of the guest itself, in its first root. */
export const guestWork = {
  /** `filesRead` has the answer. */
  read: (paths: readonly string[]) => {
    const out = asked('read');
    return out.list(paths, (path) => out.bytes(path)).done();
  },
  write: (path: string, value: string) => asked('write').bytes(path).bytes(value).done(),
  removeFolder: (path: string) => asked('removeFolder').bytes(path).done(),
  killOthers: (folder: string, pid: number) => asked('killOthers').bytes(folder).u32(pid).done(),
  /** It is now. */
  clock: () => asked('clock').u64(nowNs()).done(),
  /** Nothing that was random before is any more. */
  entropy: () => asked('entropy').bytes(randomBytes(ENTROPY_BYTES)).done(),
  /** The disk with the sandbox's changes has all of them, and takes none until `thaw`. */
  freeze: () => asked('freeze').done(),
  thaw: () => asked('thaw').done(),
  network: (list: readonly GuestMessage[]) => {
    const out = asked('network');
    messages(out, list);
    return out.done();
  },
  hostName: (name: string) => asked('hostName').bytes(name).done(),
  powerOff: () => asked('powerOff').done(),
  /** Of the archive, in this order. */
  modules: (names: readonly string[]) => {
    const out = asked('modules');
    return out.list(names, (name) => out.bytes(name)).done();
  },
} as const;

/** Undefined for one that could not be read. @throws RUNTIME_AGENT_PROTOCOL */
export function filesRead(answer: Buffer, count: number): (string | undefined)[] {
  const reader = new PayloadReader(answer);
  return Array.from({ length: count }, () => {
    const errno = reader.i32();
    const bytes = reader.bytes();
    return errno === 0 ? bytes.toString('latin1') : undefined;
  });
}
