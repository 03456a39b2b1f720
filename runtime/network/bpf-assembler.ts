/**
 * Byte code of eBPF as text of TypeScript: one method an instruction, labels for jumps. Registers are numbers 0 to 10; an operand that is a
 * register is written `reg(n)`, a number is itself. Field order and sizes are the caller's; what is wrong is found by the kernel's verifier.
 */

export interface Register {
  readonly register: number;
}

export type Operand = number | Register;

export function reg(register: number): Register {
  return { register };
}

/** The frame pointer: the stack lies below it, 512 bytes. */
export const FRAME = 10;

export type Width = 1 | 2 | 4 | 8;
const WIDTH: Readonly<Record<Width, number>> = { 4: 0x00, 2: 0x08, 1: 0x10, 8: 0x18 };
const ARITHMETIC = { add: 0x00, sub: 0x10, or: 0x40, and: 0x50, lsh: 0x60, rsh: 0x70, xor: 0xa0, mov: 0xb0 } as const;
const JUMP = { eq: 0x10, gt: 0x20, ge: 0x30, set: 0x40, ne: 0x50, lt: 0xa0, le: 0xb0 } as const;

/** Functions of the kernel. */
export const HELPER = {
  lookUp: 1,
  update: 2,
  now: 5,
  storeBytes: 9,
  currentPid: 14,
  currentUser: 15,
  currentName: 16,
  redirect: 23,
  loadBytes: 26,
  checksumDifference: 28,
  changeTail: 38,
  routeLookUp: 69,
  namespaceCookie: 122,
  ringOutput: 130,
} as const;

export class BpfAssembler {
  private readonly code: Buffer[] = [];
  private readonly labels = new Map<string, number>();
  private readonly jumps: { readonly at: number; readonly label: string }[] = [];

  /** A label that nothing else has. */
  fresh(): string {
    return `#${this.code.length}`;
  }

  label(name: string): this {
    if (this.labels.has(name)) throw new Error(`label ${name} twice`);
    this.labels.set(name, this.code.length);
    return this;
  }

  /** to = *(from + offset) */
  load(width: Width, to: number, from: number, offset: number): this {
    return this.emit(0x61 | WIDTH[width], to, from, offset, 0);
  }

  /** *(base + offset) = value */
  store(width: Width, base: number, offset: number, value: Operand): this {
    return typeof value === 'number'
      ? this.emit(0x62 | WIDTH[width], base, 0, offset, value)
      : this.emit(0x63 | WIDTH[width], base, value.register, offset, 0);
  }

  /** *(u64*)(base + offset) += from, whoever else does it. */
  addAtomic(base: number, offset: number, from: number): this {
    return this.emit(0xdb, base, from, offset, 0);
  }

  /** Between the network's byte order and this machine's. */
  swap(bits: 16 | 32, register: number): this {
    return this.emit(0xdc, register, 0, 0, bits);
  }

  do(operation: keyof typeof ARITHMETIC, to: number, value: Operand): this {
    return typeof value === 'number'
      ? this.emit(0x07 | ARITHMETIC[operation], to, 0, 0, value)
      : this.emit(0x0f | ARITHMETIC[operation], to, value.register, 0, 0);
  }

  move(to: number, value: Operand): this {
    return this.do('mov', to, value);
  }

  /** to = the address of the stack at `offset` */
  stack(to: number, offset: number): this {
    return this.move(to, reg(FRAME)).do('add', to, offset);
  }

  jumpIf(condition: keyof typeof JUMP, left: number, right: Operand, label: string): this {
    this.jumps.push({ at: this.code.length, label });
    return typeof right === 'number'
      ? this.emit(0x05 | JUMP[condition], left, 0, 0, right)
      : this.emit(0x0d | JUMP[condition], left, right.register, 0, 0);
  }

  jump(label: string): this {
    this.jumps.push({ at: this.code.length, label });
    return this.emit(0x05, 0, 0, 0, 0);
  }

  /** to = the map with this descriptor */
  map(to: number, fd: number): this {
    return this.emit(0x18, to, 1, 0, fd).emit(0, 0, 0, 0, 0);
  }

  /** to = a number of 64 bits */
  wide(to: number, value: bigint): this {
    const bits = BigInt.asUintN(64, value);
    return this.emit(0x18, to, 0, 0, Number(bits & 0xffffffffn)).emit(0, 0, 0, 0, Number(bits >> 32n));
  }

  call(helper: number): this {
    return this.emit(0x85, 0, 0, 0, helper);
  }

  return(value?: number): this {
    if (value !== undefined) this.move(0, value);
    return this.emit(0x95, 0, 0, 0, 0);
  }

  build(): Buffer {
    for (const { at, label } of this.jumps) {
      const target = this.labels.get(label);
      if (target === undefined) throw new Error(`no label ${label}`);
      this.code[at]!.writeInt16LE(target - at - 1, 2);
    }
    return Buffer.concat(this.code);
  }

  private emit(operation: number, to: number, from: number, offset: number, immediate: number): this {
    const bytes = Buffer.alloc(8);
    bytes[0] = operation;
    bytes[1] = to | (from << 4);
    bytes.writeInt16LE(offset, 2);
    bytes.writeInt32LE(immediate | 0, 4);
    this.code.push(bytes);
    return this;
  }
}
