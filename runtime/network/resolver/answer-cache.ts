/** Answers for as long as they hold; of too many, those go first that were not asked for longest. */
export interface CachedAnswer {
  readonly untilMs: number;
}

export class AnswerCache<T extends CachedAnswer> {
  private readonly most: number;
  private readonly entries = new Map<string, T>();

  constructor(most: number) {
    this.most = most;
  }

  get size(): number {
    return this.entries.size;
  }

  get(key: string, nowMs: number): T | undefined {
    const found = this.entries.get(key);
    if (found === undefined) return undefined;
    this.entries.delete(key);
    if (found.untilMs <= nowMs) return undefined;
    this.entries.set(key, found);
    return found;
  }

  set(key: string, answer: T): void {
    this.entries.delete(key);
    this.entries.set(key, answer);
    if (this.entries.size > this.most) this.entries.delete(this.entries.keys().next().value!);
  }
}
