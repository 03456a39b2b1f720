/**
 * Takes the guest's memory out of QEMU's stream of state. A machine whose memory is its own file leaves it out itself; one with private memory cannot,
 * and would be stored whole each time. What passes is as the other kind writes it, so that one restore fits both.
 *
 * The stream (docs of QEMU, migration): a head, the section `ram` in parts of pages, then one section for each device, which are not looked at. Anything else
 * than expected ends it with an error: better no snapshot than one that lacks something.
 */
import { Transform, type TransformCallback } from 'node:stream';

const PAGE = 4096;
const SECTION = { start: 1, part: 2, end: 3, footer: 0x7e };
const FLAG = { zero: 0x02, sizes: 0x04, page: 0x08, end: 0x10, sameBlock: 0x20 };
const FLAGS = 0xfff;
/** Behind its number: the name, its length before it; instance 0, version 4. */
const RAM_HEAD = Buffer.from([3, 0x72, 0x61, 0x6d, 0, 0, 0, 0, 0, 0, 0, 4]);
const MAX_HEAD = 64 * 1024;
const MAX_WAITING = 4 * 1024 * 1024;
/** As the memory of `arguments.ts` is called, in machines older and newer. */
const MEMORY_NAMES = ['ram', '/objects/ram'];

export interface PageTaker {
  /** A page of the guest's memory that is not zeros. The bytes are its own until it returns. */
  page(offset: number, bytes: Buffer): void;
}

type Step = () => boolean;

export class RamStream extends Transform {
  private readonly taker: PageTaker;
  private readonly memoryBytes: number;
  private waiting: Buffer = Buffer.alloc(0);
  private step: Step = () => this.head();
  private block = '';
  private sizesLeft = 0;

  constructor(taker: PageTaker, memoryBytes: number) {
    super({ highWaterMark: 1 << 20 });
    this.taker = taker;
    this.memoryBytes = memoryBytes;
  }

  override _transform(bytes: Buffer, _encoding: BufferEncoding, done: TransformCallback): void {
    try {
      this.waiting = this.waiting.length === 0 ? bytes : Buffer.concat([this.waiting, bytes]);
      while (this.step());
      if (this.waiting.length > MAX_WAITING) throw new Error('a part of it does not end');
    } catch (error) {
      done(error as Error);
      return;
    }
    done();
  }

  override _flush(done: TransformCallback): void {
    done(this.step === this.devices ? undefined : new Error('the stream of state ends inside the memory'));
  }

  private head(): boolean {
    const at = this.waiting.indexOf(RAM_HEAD);
    if (at < 5 || this.waiting[at - 5] !== SECTION.start) {
      if (this.waiting.length > MAX_HEAD) throw new Error('no memory in the stream of state');
      return false;
    }
    return this.pass(at + RAM_HEAD.length, () => this.entry());
  }

  /** A record of the section: pages, sizes, or its end. */
  private entry(): boolean {
    if (this.waiting.length < 8) return false;
    const low = this.waiting.readUInt32BE(4);
    const flags = low & FLAGS;
    const offset = this.waiting.readUInt32BE(0) * 2 ** 32 + (low - flags);
    if (flags === FLAG.end) return this.pass(8, () => this.footer());
    if (flags === FLAG.sizes) {
      this.sizesLeft = offset;
      return this.pass(8, () => this.size());
    }
    return this.pageRecord(flags, offset);
  }

  private pageRecord(flags: number, offset: number): boolean {
    const kind = flags & ~FLAG.sameBlock;
    if (kind !== FLAG.page && kind !== FLAG.zero)
      throw new Error(`a record of memory with flags 0x${flags.toString(16)}`);
    let at = 8;
    let block = this.block;
    if ((flags & FLAG.sameBlock) === 0) {
      const name = this.name(at);
      if (name === undefined) return false;
      block = name.text;
      at = name.end;
    }
    const end = at + (kind === FLAG.page ? PAGE : 1);
    if (this.waiting.length < end) return false;
    this.block = block;
    if (!MEMORY_NAMES.includes(block)) return this.pass(end, this.step);
    if (offset + PAGE > this.memoryBytes) throw new Error(`a page at ${offset}, outside the memory`);
    if (kind === FLAG.page) this.taker.page(offset, this.waiting.subarray(at, end));
    else if (this.waiting[at] !== 0) throw new Error('a page of one value that is not 0');
    this.waiting = this.waiting.subarray(end);
    return true;
  }

  /** Of one block of memory: its name, bytes and address. */
  private size(): boolean {
    if (this.sizesLeft <= 0) {
      this.step = () => this.entry();
      return true;
    }
    const name = this.name(0);
    if (name === undefined || this.waiting.length < name.end + 16) return false;
    this.sizesLeft -= Number(this.waiting.readBigUInt64BE(name.end));
    return this.pass(name.end + 16, this.step);
  }

  private footer(): boolean {
    if (this.waiting.length < 5) return false;
    if (this.waiting[0] !== SECTION.footer) throw new Error('a part of the memory without its end');
    return this.pass(5, () => this.next());
  }

  private next(): boolean {
    if (this.waiting.length < 1) return false;
    const kind = this.waiting[0];
    if (kind === SECTION.part || kind === SECTION.end) {
      if (this.waiting.length < 5) return false;
      return this.pass(5, () => this.entry());
    }
    this.step = this.devices;
    return true;
  }

  private readonly devices: Step = () => {
    if (this.waiting.length > 0) this.push(this.waiting);
    this.waiting = Buffer.alloc(0);
    return false;
  };

  private name(at: number): { text: string; end: number } | undefined {
    const length = this.waiting[at];
    if (length === undefined || this.waiting.length < at + 1 + length) return undefined;
    return { text: this.waiting.toString('latin1', at + 1, at + 1 + length), end: at + 1 + length };
  }

  private pass(bytes: number, next: Step): boolean {
    // Its own: what the rest of the buffer is, others write to.
    this.push(Buffer.from(this.waiting.subarray(0, bytes)));
    this.waiting = this.waiting.subarray(bytes);
    this.step = next;
    return true;
  }
}
