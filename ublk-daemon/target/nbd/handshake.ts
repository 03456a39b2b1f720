/**
 * What client and server agree on before the first request: the export, structured replies, block status.
 *
 * A pure machine: bytes in by `step`, replies out by `send`. What a client gets wrong in an option is answered with an error
 * and the talk goes on; where it cannot go on (wrong magic, a name nobody has through the old option), the connection ends.
 */
import type { ByteInput } from './byte-input.ts';
import type { OpenExport } from './export.ts';
import {
  ALLOCATION_CONTEXT,
  ALLOCATION_CONTEXT_ID,
  HANDSHAKE,
  INFO,
  MAGIC,
  MAX_PAYLOAD_BYTES,
  MAX_STRING_BYTES,
  OPTION,
  OPTION_HEADER_BYTES,
  OPTION_MAGIC,
  OPTION_REPLY,
  OPTION_REPLY_MAGIC,
  TRANSMISSION,
} from './protocol.ts';

export interface Agreement {
  readonly export: OpenExport;
  readonly structured: boolean;
  /** The client may ask for block status. */
  readonly allocation: boolean;
}

/** `more`: it waits for bytes. `end`: what was sent is all; the connection ends. */
export type Step = 'more' | 'end' | Agreement;

/** Longer options are skipped and refused; no client has a use for one. */
const MAX_OPTION_BYTES = 64 * 1024;
/** Whoever announces more than this is no NBD client. */
const MAX_SKIPPED_BYTES = 2 ** 20;
/** A client that haggles for ever is cut off. */
const MAX_OPTIONS = 1000;
const PREFERRED_BLOCK_BYTES = 4096;

export class Handshake {
  readonly #exports: ReadonlyMap<string, OpenExport>;
  readonly #send: (bytes: Buffer) => void;
  #clientFlags: number | undefined;
  #option: { readonly code: number; readonly length: number } | undefined;
  #skip = 0;
  #options = 0;
  #structured = false;
  /** The export that block status was agreed for. */
  #allocationOf: string | undefined;

  constructor(exports: ReadonlyMap<string, OpenExport>, send: (bytes: Buffer) => void) {
    this.#exports = exports;
    this.#send = send;
  }

  greet(): void {
    const greeting = Buffer.allocUnsafe(18);
    greeting.writeBigUInt64BE(MAGIC, 0);
    greeting.writeBigUInt64BE(OPTION_MAGIC, 8);
    greeting.writeUInt16BE(HANDSHAKE.FIXED_NEWSTYLE | HANDSHAKE.NO_ZEROES, 16);
    this.#send(greeting);
  }

  /** Takes one step with what has come; to be called again until it answers `more`. */
  step(input: ByteInput): Step | undefined {
    if (this.#clientFlags === undefined) {
      const flags = input.take(4)?.readUInt32BE(0);
      if (flags === undefined) return 'more';
      if ((flags & ~(HANDSHAKE.FIXED_NEWSTYLE | HANDSHAKE.NO_ZEROES)) !== 0) return 'end';
      this.#clientFlags = flags;
      return undefined;
    }
    if (this.#option === undefined) {
      const header = input.take(OPTION_HEADER_BYTES);
      if (header === undefined) return 'more';
      if (header.readBigUInt64BE(0) !== OPTION_MAGIC || ++this.#options > MAX_OPTIONS) return 'end';
      this.#option = { code: header.readUInt32BE(8), length: header.readUInt32BE(12) };
      if (this.#option.length > MAX_SKIPPED_BYTES) return 'end';
      this.#skip = this.#option.length > MAX_OPTION_BYTES ? this.#option.length : 0;
    }
    const { code, length } = this.#option;
    if (this.#skip > 0) {
      this.#skip -= input.skip(this.#skip);
      if (this.#skip > 0) return 'more';
      this.#option = undefined;
      if (code === OPTION.EXPORT_NAME) return 'end';
      this.#refuse(code, OPTION_REPLY.ERR_TOO_BIG, `an option of ${length} bytes`);
      return undefined;
    }
    const data = input.take(length);
    if (data === undefined) return 'more';
    this.#option = undefined;
    return this.#answer(code, data);
  }

  #answer(code: number, data: Buffer): Step | undefined {
    switch (code) {
      case OPTION.EXPORT_NAME:
        return this.#exportName(data);
      case OPTION.ABORT:
        this.#reply(code, OPTION_REPLY.ACK);
        return 'end';
      case OPTION.LIST:
        return this.#list(data);
      case OPTION.INFO:
      case OPTION.GO:
        return this.#go(code, data);
      case OPTION.STRUCTURED_REPLY:
        if (data.length > 0) return this.#refuse(code, OPTION_REPLY.ERR_INVALID, 'this option has no data');
        this.#structured = true;
        return this.#reply(code, OPTION_REPLY.ACK);
      case OPTION.LIST_META_CONTEXT:
      case OPTION.SET_META_CONTEXT:
        return this.#metaContext(code, data);
      default:
        return this.#refuse(code, OPTION_REPLY.ERR_UNSUP, 'this server does not know the option');
    }
  }

  #exportName(name: Buffer): Step {
    const found = this.#lookUp(name.toString());
    if (found === undefined) return 'end';
    const zeros = (this.#clientFlags! & HANDSHAKE.NO_ZEROES) !== 0 ? 0 : 124;
    const answer = Buffer.alloc(10 + zeros);
    answer.writeBigUInt64BE(BigInt(found.target.sizeBytes), 0);
    answer.writeUInt16BE(this.#flagsOf(found), 8);
    this.#send(answer);
    return this.#agreement(found);
  }

  #list(data: Buffer): undefined {
    if (data.length > 0) return this.#refuse(OPTION.LIST, OPTION_REPLY.ERR_INVALID, 'this option has no data');
    for (const { name, description } of this.#exports.values()) {
      this.#reply(OPTION.LIST, OPTION_REPLY.SERVER, Buffer.concat([counted(name), Buffer.from(description)]));
    }
    return this.#reply(OPTION.LIST, OPTION_REPLY.ACK);
  }

  #go(code: number, data: Buffer): Step | undefined {
    const nameBytes = data.length < 6 ? 0 : data.readUInt32BE(0);
    const infos = 4 + nameBytes;
    if (data.length < 6 || data.length < infos + 2 || data.length !== infos + 2 + 2 * data.readUInt16BE(infos)) {
      return this.#refuse(code, OPTION_REPLY.ERR_INVALID, 'its lengths do not fit together');
    }
    if (nameBytes > MAX_STRING_BYTES) return this.#refuse(code, OPTION_REPLY.ERR_TOO_BIG, 'the name is too long');
    const found = this.#find(code, data.toString('utf8', 4, infos));
    if (found === undefined) return undefined;
    const wanted = new Set<number>();
    for (let at = infos + 2; at < data.length; at += 2) wanted.add(data.readUInt16BE(at));

    const size = Buffer.alloc(12);
    size.writeUInt16BE(INFO.EXPORT, 0);
    size.writeBigUInt64BE(BigInt(found.target.sizeBytes), 2);
    size.writeUInt16BE(this.#flagsOf(found), 10);
    this.#reply(code, OPTION_REPLY.INFO, size);
    if (wanted.has(INFO.NAME)) this.#reply(code, OPTION_REPLY.INFO, info(INFO.NAME, found.name));
    if (wanted.has(INFO.DESCRIPTION) && found.description !== '') {
      this.#reply(code, OPTION_REPLY.INFO, info(INFO.DESCRIPTION, found.description));
    }
    const blocks = Buffer.alloc(14);
    blocks.writeUInt16BE(INFO.BLOCK_SIZE, 0);
    blocks.writeUInt32BE(found.target.blockSize, 2);
    blocks.writeUInt32BE(Math.max(PREFERRED_BLOCK_BYTES, found.target.blockSize), 6);
    blocks.writeUInt32BE(MAX_PAYLOAD_BYTES, 10);
    this.#reply(code, OPTION_REPLY.INFO, blocks);
    this.#reply(code, OPTION_REPLY.ACK);
    return code === OPTION.GO ? this.#agreement(found) : undefined;
  }

  #metaContext(code: number, data: Buffer): undefined {
    if (code === OPTION.SET_META_CONTEXT) this.#allocationOf = undefined;
    if (!this.#structured) return this.#refuse(code, OPTION_REPLY.ERR_INVALID, 'ask for structured replies first');
    const parsed = parseQueries(data);
    if (parsed === undefined) return this.#refuse(code, OPTION_REPLY.ERR_INVALID, 'its lengths do not fit together');
    const found = this.#find(code, parsed.name);
    if (found === undefined) return undefined;
    const listing = code === OPTION.LIST_META_CONTEXT;
    const asked =
      (listing && parsed.queries.length === 0) ||
      parsed.queries.some((query) => query === ALLOCATION_CONTEXT || (listing && query === 'base:'));
    if (asked && found.extents !== undefined) {
      const context = Buffer.alloc(4 + ALLOCATION_CONTEXT.length);
      context.writeUInt32BE(listing ? 0 : ALLOCATION_CONTEXT_ID, 0);
      context.write(ALLOCATION_CONTEXT, 4, 'latin1');
      this.#reply(code, OPTION_REPLY.META_CONTEXT, context);
      if (!listing) this.#allocationOf = found.name;
    }
    return this.#reply(code, OPTION_REPLY.ACK);
  }

  #find(code: number, name: string): OpenExport | undefined {
    const found = this.#lookUp(name);
    if (found === undefined) this.#refuse(code, OPTION_REPLY.ERR_UNKNOWN, `no export has the name "${name}"`);
    return found;
  }

  /** Clients that name no export get the default one: '' if there is one, else the first. */
  #lookUp(name: string): OpenExport | undefined {
    return this.#exports.get(name) ?? (name === '' ? [...this.#exports.values()][0] : undefined);
  }

  #flagsOf(found: OpenExport): number {
    return found.flags | (this.#structured ? TRANSMISSION.SEND_DF : 0);
  }

  #agreement(found: OpenExport): Agreement {
    return { export: found, structured: this.#structured, allocation: this.#allocationOf === found.name };
  }

  #refuse(code: number, error: number, message: string): undefined {
    return this.#reply(code, error, Buffer.from(message).subarray(0, MAX_STRING_BYTES));
  }

  #reply(code: number, type: number, data: Buffer = Buffer.alloc(0)): undefined {
    const header = Buffer.allocUnsafe(20);
    header.writeBigUInt64BE(OPTION_REPLY_MAGIC, 0);
    header.writeUInt32BE(code, 8);
    header.writeUInt32BE(type, 12);
    header.writeUInt32BE(data.length, 16);
    this.#send(data.length === 0 ? header : Buffer.concat([header, data]));
    return undefined;
  }
}

function counted(text: string): Buffer {
  const bytes = Buffer.from(text);
  const length = Buffer.allocUnsafe(4);
  length.writeUInt32BE(bytes.length, 0);
  return Buffer.concat([length, bytes]);
}

function info(type: number, text: string): Buffer {
  const bytes = Buffer.from(text);
  const data = Buffer.allocUnsafe(2 + bytes.length);
  data.writeUInt16BE(type, 0);
  bytes.copy(data, 2);
  return data;
}

/** A name and queries, each with its length before it; undefined when the lengths do not add up. */
function parseQueries(data: Buffer): { readonly name: string; readonly queries: readonly string[] } | undefined {
  let at = 0;
  const number = () => {
    at += 4;
    return at <= data.length ? data.readUInt32BE(at - 4) : undefined;
  };
  const text = () => {
    const length = number();
    if (length === undefined || length > data.length - at) return undefined;
    at += length;
    return data.toString('utf8', at - length, at);
  };
  const name = text();
  const count = number();
  if (name === undefined || count === undefined || count > data.length / 4) return undefined;
  const queries: string[] = [];
  for (let i = 0; i < count; i++) {
    const query = text();
    if (query === undefined) return undefined;
    queries.push(query);
  }
  return at === data.length ? { name, queries } : undefined;
}
