/**
 * Many small changes as one transaction: whatever is asked for while one group is being written makes up the next. Under load groups grow,
 * and the price of a commit is shared; alone, a change waits for nobody.
 */
import { isDsecError, systemCode } from '#base';

interface Waiting<O, R> {
  readonly operation: O;
  readonly resolve: (result: R) => void;
  readonly reject: (error: unknown) => void;
}

/** `run` gives one result for each operation, in order; an Error among them is that operation's alone. */
export class Grouped<O, R> {
  readonly #run: (operations: readonly O[]) => Promise<readonly (R | Error)[]>;
  readonly #largest: number;
  #waiting: Waiting<O, R>[] = [];
  #running: Promise<void> | undefined;

  constructor(run: (operations: readonly O[]) => Promise<readonly (R | Error)[]>, largest = 2000) {
    this.#run = run;
    this.#largest = largest;
  }

  add(operation: O): Promise<R> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ operation, resolve, reject });
      this.#running ??= this.#work();
    });
  }

  async idle(): Promise<void> {
    while (this.#running !== undefined) await this.#running;
  }

  async #work(): Promise<void> {
    // Those that come in the same turn of the event loop belong together.
    await new Promise((resolve) => setImmediate(resolve));
    while (this.#waiting.length > 0) {
      const group = this.#waiting.splice(0, this.#largest);
      await this.#one(group);
    }
    this.#running = undefined;
  }

  async #one(group: readonly Waiting<O, R>[]): Promise<void> {
    try {
      const results = await this.#run(group.map(({ operation }) => operation));
      for (const [i, { resolve, reject }] of group.entries()) {
        const result = results[i] as R | Error;
        if (result instanceof Error) reject(result);
        else resolve(result);
      }
    } catch (error) {
      if (group.length === 1 || !isOfOne(error)) {
        for (const { reject } of group) reject(error);
      } else {
        // Nothing of it was written. Whichever it was shall fail alone.
        for (const one of group) await this.#one([one]);
      }
    }
  }
}

/** Values that the database does not take, rather than a database that is full, busy or away, of which nobody may know what it has done. */
function isOfOne(error: unknown): boolean {
  if (!isDsecError(error)) return true;
  const code = systemCode(error.cause) ?? '';
  return /^(22|23)...$/.test(code) || /^SQLITE_(CONSTRAINT|MISMATCH|TOOBIG)/.test(code);
}
