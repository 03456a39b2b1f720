/**
 * Classic BPF, written from its end to its beginning. All jumps lead forward, so whatever is jumped to is there already, and whether a jump
 * reaches it is known: where it does not, one that does is put between. Nothing runs into that, since what is placed next is a branch,
 * both ways of which say where they lead.
 */

/** Instructions from there to the end of the program. */
export type Label = number;

type Instruction = readonly [code: number, jumpTrue: number, jumpFalse: number, k: number];

const LOAD = 0x20;
const AND = 0x54;
const JUMP = 0x05;
const RETURN = 0x06;
const BRANCHES = { equal: 0x15, greater: 0x25, 'greater or equal': 0x35 } as const;

/** Of a branch, in instructions. */
const REACH = 255;
/** Placed between a return and the branch to it by that branch itself: one for the other way. */
const SPARE = 1;

export class BackwardProgram {
  /** The last one first. */
  readonly #placed: Instruction[] = [];
  readonly #returns = new Map<number, Label>();

  get length(): number {
    return this.#placed.length;
  }

  /** The word of seccomp_data at that offset, into the accumulator. */
  load(offset: number): Label {
    return this.#place([LOAD, 0, 0, offset]);
  }

  and(mask: number): Label {
    return this.#place([AND, 0, 0, mask]);
  }

  /** Within reach of the branch that is placed next. */
  returning(value: number): Label {
    const known = this.#returns.get(value);
    if (known !== undefined && this.#distance(known) + SPARE <= REACH) return known;
    const label = this.#place([RETURN, 0, 0, value]);
    this.#returns.set(value, label);
    return label;
  }

  /** Compares the accumulator. */
  branch(how: keyof typeof BRANCHES, value: number, yes: Label, no: Label): Label {
    // The farther one first: what is put between for it moves the other one away too.
    const reached = [yes, no].sort((a, b) => a - b).map((label) => [label, this.#within(label)] as const);
    const [to, or] = [yes, no].map((label) => this.#distance(reached.find(([wanted]) => wanted === label)![1]));
    return this.#place([BRANCHES[how], to!, or!, value]);
  }

  /** What is placed next runs on there. */
  flowInto(label: Label): void {
    if (this.#distance(label) > 0) this.#place([JUMP, 0, 0, this.#distance(label)]);
  }

  /** struct sock_filter, one after the other. */
  encoded(): Buffer {
    const bytes = Buffer.alloc(this.#placed.length * 8);
    [...this.#placed].reverse().forEach(([code, jumpTrue, jumpFalse, k], i) => {
      bytes.writeUInt16LE(code, i * 8);
      bytes.writeUInt8(jumpTrue, i * 8 + 2);
      bytes.writeUInt8(jumpFalse, i * 8 + 3);
      bytes.writeUInt32LE(k >>> 0, i * 8 + 4);
    });
    return bytes;
  }

  #within(label: Label): Label {
    if (this.#distance(label) + SPARE <= REACH) return label;
    return this.#place([JUMP, 0, 0, this.#distance(label)]);
  }

  /** From the instruction that is placed next. */
  #distance(label: Label): number {
    return this.#placed.length - label;
  }

  #place(instruction: Instruction): Label {
    return this.#placed.push(instruction);
  }
}
