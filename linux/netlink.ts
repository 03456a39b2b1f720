/**
 * Questions to the kernel over netlink (links, addresses, routes, filters), synchronous: the kernel answers within the call. Where `ip` and
 * `tc` cost a process each, this costs microseconds.
 */
import { closeSync } from 'node:fs';
import { type Call, call, callInPool, syscallError } from './libc.ts';

const SOCKET: Call = { name: 'socket', result: 'int', args: ['int', 'int', 'int'] };
const SEND: Call = { name: 'send', result: 'long', args: ['int', 'void*', 'size_t', 'int'] };
const RECV: Call = { name: 'recv', result: 'long', args: ['int', 'void*', 'size_t', 'int'] };
const SETSOCKOPT: Call = { name: 'setsockopt', result: 'int', args: ['int', 'int', 'int', 'void*', 'int'] };
const GETSOCKOPT: Call = { name: 'getsockopt', result: 'int', args: ['int', 'int', 'int', 'void*', 'void*'] };
const IF_NAMETOINDEX: Call = { name: 'if_nametoindex', result: 'int', args: ['void*'] };

const AF_NETLINK = 16;
const SOCK_RAW_CLOEXEC = 3 | 0o2000000;
const SOL_SOCKET = 1;
const SO_NETNS_COOKIE = 71;
const SO_RCVTIMEO = 20;
const EIO = 5;

const HEADER = 16;
const NLMSG_ERROR = 2;
const NLMSG_DONE = 3;
const NLM_F_REQUEST = 1;
const NLM_F_ACK = 4;
const NLM_F_DUMP = 0x300;
export const NLM_F_REPLACE = 0x100;
export const NLM_F_EXCL = 0x200;
export const NLM_F_CREATE = 0x400;

export interface NetlinkRequest {
  /** For the message of an error. */
  readonly what: string;
  readonly type: number;
  /** Beside those of every request. */
  readonly flags?: number;
  readonly payload: Buffer;
  /** Error numbers that mean that nothing has to be done. */
  readonly ignore?: readonly number[];
}

export class NetlinkSocket {
  private readonly fd: number;
  private sequence = 0;
  private readonly answer = Buffer.alloc(64 << 10);

  /** In the namespace that this thread is in. Family 0: links, addresses, routes, filters. @throws SyscallError */
  constructor(family = 0) {
    this.fd = call(SOCKET, [AF_NETLINK, SOCK_RAW_CLOEXEC, family], 'netlink');
    const timeout = Buffer.alloc(16);
    timeout.writeBigInt64LE(30n, 0);
    call(SETSOCKOPT, [this.fd, SOL_SOCKET, SO_RCVTIMEO, timeout, timeout.length], 'netlink');
  }

  close(): void {
    closeSync(this.fd);
  }

  /** A number that names this socket's namespace as long as the machine runs. */
  namespaceCookie(): bigint {
    const cookie = Buffer.alloc(8);
    const length = Buffer.from([8, 0, 0, 0]);
    call(GETSOCKOPT, [this.fd, SOL_SOCKET, SO_NETNS_COOKIE, cookie, length], 'netlink');
    return cookie.readBigUInt64LE(0);
  }

  /** All in one go, in order. All are tried, as the kernel does it. @throws SyscallError for the first that failed */
  send(requests: readonly NetlinkRequest[]): void {
    const { first, bytes } = this.encoded(requests);
    call(SEND, [this.fd, bytes, bytes.length, 0], requests[0]?.what);
    this.readAnswers(requests, first);
  }

  /** The same in a thread of the pool, for what waits for others: links come and go one after the other, on the whole machine. */
  async sendInPool(requests: readonly NetlinkRequest[]): Promise<void> {
    const { first, bytes } = this.encoded(requests);
    const sent = await callInPool(SEND, [this.fd, bytes, bytes.length, 0]);
    if (sent !== bytes.length) throw syscallError('send', EIO, requests[0]?.what ?? 'netlink');
    this.readAnswers(requests, first);
  }

  private encoded(requests: readonly NetlinkRequest[]): { readonly first: number; readonly bytes: Buffer } {
    const first = this.sequence + 1;
    const messages = requests.map(({ type, flags = 0, payload }) => {
      return message(type, NLM_F_REQUEST | NLM_F_ACK | flags, ++this.sequence, payload);
    });
    return { first, bytes: Buffer.concat(messages) };
  }

  private readAnswers(requests: readonly NetlinkRequest[], first: number): void {
    let failed: { readonly request: NetlinkRequest; readonly errno: number } | undefined;
    for (let left = requests.length; left > 0; ) {
      for (const { type, sequence, payload } of this.receive()) {
        if (type !== NLMSG_ERROR || sequence < first) continue;
        left--;
        const errno = -payload.readInt32LE(0);
        const request = requests[sequence - first]!;
        if (errno !== 0 && request.ignore?.includes(errno) !== true) failed ??= { request, errno };
      }
    }
    if (failed !== undefined) throw syscallError('netlink', failed.errno, failed.request.what);
  }

  /** What there is of a kind: the payloads. @throws SyscallError */
  dump(what: string, type: number, payload: Buffer): Buffer[] {
    const sequence = ++this.sequence;
    const bytes = message(type, NLM_F_REQUEST | NLM_F_DUMP, sequence, payload);
    call(SEND, [this.fd, bytes, bytes.length, 0], what);
    const found: Buffer[] = [];
    for (;;) {
      for (const one of this.receive()) {
        if (one.sequence !== sequence) continue;
        if (one.type === NLMSG_DONE) return found;
        if (one.type === NLMSG_ERROR) throw syscallError('netlink', -one.payload.readInt32LE(0), what);
        found.push(Buffer.from(one.payload));
      }
    }
  }

  private *receive(): Generator<{ readonly type: number; readonly sequence: number; readonly payload: Buffer }> {
    const length = call(RECV, [this.fd, this.answer, this.answer.length, 0], 'netlink');
    for (let at = 0; at + HEADER <= length; ) {
      const size = this.answer.readUInt32LE(at);
      if (size < HEADER || at + size > length) return;
      const payload = this.answer.subarray(at + HEADER, at + size);
      yield { type: this.answer.readUInt16LE(at + 4), sequence: this.answer.readUInt32LE(at + 8), payload };
      at += (size + 3) & ~3;
    }
  }
}

function message(type: number, flags: number, sequence: number, payload: Buffer): Buffer {
  const header = Buffer.alloc(HEADER);
  header.writeUInt32LE(HEADER + payload.length, 0);
  header.writeUInt16LE(type, 4);
  header.writeUInt16LE(flags, 6);
  header.writeUInt32LE(sequence, 8);
  return padded(Buffer.concat([header, payload]));
}

function padded(bytes: Buffer): Buffer {
  return bytes.length % 4 === 0 ? bytes : Buffer.concat([bytes, Buffer.alloc(4 - (bytes.length % 4))]);
}

/** An attribute: a number is four bytes, text ends with a zero byte, a list is nested. */
export function attribute(type: number, value: Buffer | string | number | readonly Buffer[]): Buffer {
  const bytes = attributeBytes(value);
  const header = Buffer.alloc(4);
  header.writeUInt16LE(4 + bytes.length, 0);
  header.writeUInt16LE(type, 2);
  return padded(Buffer.concat([header, bytes]));
}

function attributeBytes(value: Buffer | string | number | readonly Buffer[]): Buffer {
  if (typeof value === 'string') return Buffer.from(`${value}\0`);
  if (typeof value !== 'number') return Buffer.isBuffer(value) ? value : Buffer.concat(value);
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value >>> 0, 0);
  return bytes;
}

/** Attributes by type, from a payload past its fixed part. */
export function attributesOf(payload: Buffer, from: number): Map<number, Buffer> {
  const found = new Map<number, Buffer>();
  for (let at = from; at + 4 <= payload.length; ) {
    const size = payload.readUInt16LE(at);
    if (size < 4 || at + size > payload.length) break;
    found.set(payload.readUInt16LE(at + 2) & 0x3fff, payload.subarray(at + 4, at + size));
    at += (size + 3) & ~3;
  }
  return found;
}

/** Number of a link in the namespace that this thread is in; undefined when there is none. */
export function linkNumber(name: string): number | undefined {
  return call(IF_NAMETOINDEX, [Buffer.from(`${name}\0`)], name) || undefined;
}
