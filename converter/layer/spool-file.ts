/** One growing file of a spool: appended to in large pieces, read back, and cut short where something is taken back. */
import { closeSync, ftruncateSync, openSync, readSync, writevSync } from 'node:fs';

export class SpoolFile {
  readonly #fd: number;
  /** Bytes in it that count. */
  length = 0;

  constructor(path: string) {
    this.#fd = openSync(path, 'w+', 0o644);
  }

  append(pieces: readonly Buffer[]): void {
    let rest = pieces.filter((piece) => piece.length > 0);
    while (rest.length > 0) {
      let written = writevSync(this.#fd, rest, this.length);
      this.length += written;
      while (rest.length > 0 && written >= rest[0]!.length) written -= rest.shift()!.length;
      if (written > 0) rest = [rest[0]!.subarray(written), ...rest.slice(1)];
    }
  }

  /** Forgets what lies after `length`. */
  rewind(length: number): void {
    this.length = length;
  }

  /** Fills `into` from `position` on. */
  readAt(position: number, into: Buffer): void {
    for (let done = 0; done < into.length; ) {
      const n = readSync(this.#fd, into, done, into.length - done, position + done);
      if (n === 0) throw new Error('spool file ends early');
      done += n;
    }
  }

  /** Cuts off what was taken back. */
  finish(): void {
    ftruncateSync(this.#fd, this.length);
  }

  close(): void {
    closeSync(this.#fd);
  }
}
