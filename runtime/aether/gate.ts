/** Work on many files, some at a time. */

const AT_ONCE = 16;

/** A round trip each would make a large tree slow; all at once would take as much memory as it has names. */
export async function together<T>(items: readonly T[], work: (item: T) => Promise<void>): Promise<void> {
  for (let at = 0; at < items.length; at += AT_ONCE) await Promise.all(items.slice(at, at + AT_ONCE).map(work));
}

/** So many at a time, whatever the depth of the tree. */
export class Gate {
  private free = AT_ONCE;
  private readonly waiting: (() => void)[] = [];

  async run<T>(work: () => Promise<T>): Promise<T> {
    if (this.free > 0) this.free--;
    else await new Promise<void>((go) => this.waiting.push(go));
    try {
      return await work();
    } finally {
      const next = this.waiting.shift();
      if (next === undefined) this.free++;
      else next();
    }
  }
}
