/** Work on one thing, one after the other in the order of asking; work on different things at once. */
export class InTurn<K> {
  private readonly last = new Map<K, Promise<void>>();

  async run<T>(key: K, work: () => Promise<T>): Promise<T> {
    const result = (this.last.get(key) ?? Promise.resolve()).then(work);
    const over = result.then(
      () => {},
      () => {},
    );
    this.last.set(key, over);
    try {
      return await result;
    } finally {
      if (this.last.get(key) === over) this.last.delete(key);
    }
  }
}
