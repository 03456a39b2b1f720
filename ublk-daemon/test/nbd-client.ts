/**
 * A small NBD client for tests: well-behaved through its methods, and able to send any bytes. Follows the protocol's document, and
 * checks what it receives: a reply that no request asked for, or a chunk that does not fit, ends it with an error.
 */
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import type { NbdAddress } from '../target/nbd/address.ts';
import {
  ALLOCATION_CONTEXT,
  CHUNK,
  CHUNK_MAGIC,
  COMMAND,
  INFO,
  MAGIC,
  OPTION,
  OPTION_MAGIC,
  OPTION_REPLY,
  OPTION_REPLY_MAGIC,
  REQUEST_MAGIC,
  SIMPLE_REPLY_MAGIC,
} from '../target/nbd/protocol.ts';

export class NbdError extends Error {
  readonly errno: number;
  constructor(errno: number, text: string) {
    super(`NBD error ${errno}: ${text}`);
    this.errno = errno;
  }
}

export interface OptionReply {
  readonly type: number;
  readonly data: Buffer;
}

interface Waiting {
  readonly command: number;
  readonly offset: number;
  readonly length: number;
  readonly data: Buffer | undefined;
  covered: number;
  holes: number;
  runs: { length: number; flags: number }[];
  failed: NbdError | undefined;
  resolve(result: Reply): void;
  reject(error: Error): void;
}

export interface Reply {
  readonly data: Buffer;
  /** Bytes that came as holes. */
  readonly holes: number;
  readonly runs: readonly { readonly length: number; readonly flags: number }[];
}

export class NbdClient {
  readonly socket: Socket;
  sizeBytes = 0;
  flags = 0;
  blockSize = { minimum: 0, preferred: 0, maximum: 0 };
  structured = false;
  #received = Buffer.alloc(0);
  #wake: (() => void) | undefined;
  #failure: Error | undefined;
  #next = 1;
  readonly #waiting = new Map<number, Waiting>();

  private constructor(socket: Socket) {
    this.socket = socket;
    socket.setNoDelay(true);
    const pieces: Buffer[] = [];
    socket.on('data', (chunk: Buffer) => {
      pieces.push(chunk);
      this.#received = Buffer.concat([this.#received, ...pieces.splice(0)]);
      this.#wake?.();
    });
    const ended = (error?: Error) => {
      this.#failure ??= error ?? new Error('the server closed the connection');
      this.#wake?.();
      for (const waiting of this.#waiting.values()) waiting.reject(this.#failure);
      this.#waiting.clear();
    };
    socket.on('error', ended);
    socket.on('close', () => ended());
    socket.on('end', () => ended());
  }

  /** Connected, nothing said yet. */
  static async raw(address: NbdAddress): Promise<NbdClient> {
    const socket = address.kind === 'unix' ? connect(address.path) : connect(address.port, address.host);
    const client = new NbdClient(socket);
    await once(socket, 'connect');
    return client;
  }

  /** Ready for requests. */
  static async open(
    address: NbdAddress,
    options: { name?: string; structured?: boolean; allocation?: boolean } = {},
  ): Promise<NbdClient> {
    const { name = '', structured = true, allocation = false } = options;
    const client = await NbdClient.raw(address);
    await client.greet();
    if (structured) {
      await client.option(OPTION.STRUCTURED_REPLY);
      client.structured = true;
    }
    if (allocation) await client.option(OPTION.SET_META_CONTEXT, metaQuery(name, [ALLOCATION_CONTEXT]));
    const replies = await client.option(OPTION.GO, goData(name, [INFO.BLOCK_SIZE]));
    for (const { type, data } of replies) {
      if (type !== OPTION_REPLY.INFO) continue;
      if (data.readUInt16BE(0) === INFO.EXPORT) {
        client.sizeBytes = Number(data.readBigUInt64BE(2));
        client.flags = data.readUInt16BE(10);
      }
      if (data.readUInt16BE(0) === INFO.BLOCK_SIZE) {
        client.blockSize = {
          minimum: data.readUInt32BE(2),
          preferred: data.readUInt32BE(6),
          maximum: data.readUInt32BE(10),
        };
      }
    }
    client.listen();
    return client;
  }

  async greet(clientFlags = 3): Promise<void> {
    const greeting = await this.bytes(18);
    if (greeting.readBigUInt64BE(0) !== MAGIC || greeting.readBigUInt64BE(8) !== OPTION_MAGIC) throw new Error('magic');
    const flags = Buffer.alloc(4);
    flags.writeUInt32BE(clientFlags);
    this.socket.write(flags);
  }

  /** Every reply up to the last; an error is the last one. */
  async option(code: number, data: Buffer = Buffer.alloc(0)): Promise<OptionReply[]> {
    this.sendOption(code, data);
    const replies: OptionReply[] = [];
    for (;;) {
      const header = await this.bytes(20);
      if (header.readBigUInt64BE(0) !== OPTION_REPLY_MAGIC) throw new Error('option reply magic');
      if (header.readUInt32BE(8) !== code) throw new Error('a reply to another option');
      const type = header.readUInt32BE(12);
      replies.push({ type, data: await this.bytes(header.readUInt32BE(16)) });
      if (type === OPTION_REPLY.ACK || type >= 0x80000000) return replies;
    }
  }

  sendOption(code: number, data: Buffer = Buffer.alloc(0), length = data.length): void {
    const header = Buffer.alloc(16);
    header.writeBigUInt64BE(OPTION_MAGIC, 0);
    header.writeUInt32BE(code, 8);
    header.writeUInt32BE(length, 12);
    this.socket.write(Buffer.concat([header, data]));
  }

  /** @throws when the server closes first */
  async bytes(length: number): Promise<Buffer> {
    while (this.#received.length < length) {
      if (this.#failure !== undefined) throw this.#failure;
      await new Promise<void>((wake) => {
        this.#wake = wake;
      });
    }
    const taken = this.#received.subarray(0, length);
    this.#received = this.#received.subarray(length);
    return taken;
  }

  /** Resolves when the server has closed. */
  async closed(): Promise<void> {
    if (this.socket.destroyed || this.socket.readableEnded) return;
    await new Promise<void>((done) => {
      this.socket.once('end', () => done());
      this.socket.once('close', () => done());
    });
  }

  request(
    command: number,
    offset: number,
    length: number,
    options: { flags?: number; data?: Buffer } = {},
  ): Promise<Reply> {
    const cookie = this.#next++;
    return new Promise((resolve, reject) => {
      if (this.#failure !== undefined) {
        reject(this.#failure);
        return;
      }
      const data = command === COMMAND.READ ? Buffer.alloc(length, 0xee) : undefined;
      const common = { command, offset, length, data, covered: 0, holes: 0, runs: [], failed: undefined };
      this.#waiting.set(cookie, { ...common, resolve, reject });
      this.socket.write(encodeRequest(command, offset, length, { cookie, flags: options.flags }));
      if (options.data !== undefined) this.socket.write(options.data);
    });
  }

  async read(offset: number, length: number, flags = 0): Promise<Buffer> {
    return (await this.request(COMMAND.READ, offset, length, { flags })).data;
  }

  async write(offset: number, data: Buffer, flags = 0): Promise<void> {
    await this.request(COMMAND.WRITE, offset, data.length, { data, flags });
  }

  async flush(): Promise<void> {
    await this.request(COMMAND.FLUSH, 0, 0);
  }

  async disconnect(): Promise<void> {
    this.socket.write(encodeRequest(COMMAND.DISC, 0, 0, { cookie: 0 }));
    await this.closed();
    this.socket.destroy();
  }

  /** From now on whatever comes is a reply to a request. */
  listen(): void {
    this.#replies().catch((error: Error) => {
      this.#failure ??= error;
      for (const waiting of this.#waiting.values()) waiting.reject(error);
      this.#waiting.clear();
      this.socket.destroy();
    });
  }

  async #replies(): Promise<void> {
    for (;;) {
      const header = await this.bytes(16);
      const waiting = this.#waiting.get(Number(header.readBigUInt64BE(8)));
      if (waiting === undefined) throw new Error('a reply that nobody asked for');
      const done = () => {
        this.#waiting.delete(Number(header.readBigUInt64BE(8)));
        const { data = Buffer.alloc(0), failed, holes, runs, covered, length } = waiting;
        if (failed !== undefined) return waiting.reject(failed);
        if (waiting.command === COMMAND.READ && covered !== length) throw new Error('a read that is not whole');
        waiting.resolve({ data, holes, runs });
      };
      if (header.readUInt32BE(0) === SIMPLE_REPLY_MAGIC) {
        const errno = header.readUInt32BE(4);
        if (errno !== 0) waiting.failed = new NbdError(errno, 'simple');
        else if (waiting.command === COMMAND.READ) {
          if (this.structured) throw new Error('a simple reply to a read after structured ones were agreed');
          (await this.bytes(waiting.length)).copy(waiting.data!);
          waiting.covered = waiting.length;
        }
        done();
        continue;
      }
      if (header.readUInt32BE(0) !== CHUNK_MAGIC) throw new Error('reply magic');
      const payload = await this.bytes((await this.bytes(4)).readUInt32BE(0));
      this.#chunk(waiting, header.readUInt16BE(6), payload);
      if ((header.readUInt16BE(4) & 1) !== 0) done();
    }
  }

  #chunk(waiting: Waiting, type: number, payload: Buffer): void {
    switch (type) {
      case CHUNK.NONE:
        if (payload.length > 0) throw new Error('an empty chunk with a payload');
        return;
      case CHUNK.OFFSET_DATA: {
        const at = Number(payload.readBigUInt64BE(0)) - waiting.offset;
        const data = payload.subarray(8);
        if (at < 0 || data.length === 0 || at + data.length > waiting.length)
          throw new Error('a chunk outside its read');
        data.copy(waiting.data!, at);
        waiting.covered += data.length;
        return;
      }
      case CHUNK.OFFSET_HOLE: {
        const at = Number(payload.readBigUInt64BE(0)) - waiting.offset;
        const length = payload.readUInt32BE(8);
        if (payload.length !== 12 || at < 0 || length === 0 || at + length > waiting.length) throw new Error('a hole');
        waiting.data!.fill(0, at, at + length);
        waiting.covered += length;
        waiting.holes += length;
        return;
      }
      case CHUNK.BLOCK_STATUS:
        for (let at = 4; at < payload.length; at += 8) {
          waiting.runs.push({ length: payload.readUInt32BE(at), flags: payload.readUInt32BE(at + 4) });
        }
        return;
      case CHUNK.ERROR:
        waiting.failed = new NbdError(payload.readUInt32BE(0), payload.toString('utf8', 6));
        return;
      default:
        throw new Error(`chunk type ${type}`);
    }
  }
}

export function encodeRequest(
  command: number,
  offset: number | bigint,
  length: number,
  options: { readonly cookie: number; readonly flags?: number; readonly magic?: number },
): Buffer {
  const header = Buffer.alloc(28);
  header.writeUInt32BE(options.magic ?? REQUEST_MAGIC, 0);
  header.writeUInt16BE(options.flags ?? 0, 4);
  header.writeUInt16BE(command, 6);
  header.writeBigUInt64BE(BigInt(options.cookie), 8);
  header.writeBigUInt64BE(BigInt(offset), 16);
  header.writeUInt32BE(length, 24);
  return header;
}

export function goData(name: string, infos: readonly number[] = []): Buffer {
  const bytes = Buffer.from(name);
  const data = Buffer.alloc(4 + bytes.length + 2 + 2 * infos.length);
  data.writeUInt32BE(bytes.length, 0);
  bytes.copy(data, 4);
  data.writeUInt16BE(infos.length, 4 + bytes.length);
  for (const [i, info] of infos.entries()) data.writeUInt16BE(info, 6 + bytes.length + 2 * i);
  return data;
}

export function metaQuery(name: string, queries: readonly string[]): Buffer {
  const counted = (text: string) => {
    const length = Buffer.alloc(4);
    length.writeUInt32BE(Buffer.byteLength(text));
    return Buffer.concat([length, Buffer.from(text)]);
  };
  const count = Buffer.alloc(4);
  count.writeUInt32BE(queries.length);
  return Buffer.concat([counted(name), count, ...queries.map(counted)]);
}
