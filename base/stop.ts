/**
 * The end of work that nobody waits for any more: what a read needs of AbortController and AbortSignal, without being an event
 * target. Making and listening to one of those costs 60 µs in a process that was idle, and a read of the store passes four of
 * them: that was more than the signing of its request. An AbortSignal is a StopSignal, so callers may bring theirs.
 *
 * Listeners are called in the order in which they were added, once, before `abort` returns; one must not throw.
 */

export interface StopSignal {
  readonly aborted: boolean;
  readonly reason: Error;
  throwIfAborted(): void;
  addEventListener(type: 'abort', listener: () => void, options?: { readonly once?: boolean }): void;
  removeEventListener(type: 'abort', listener: () => void): void;
}

export class StopController {
  readonly signal: StopSignal = new Stop();

  /** Only the first reason counts. */
  abort(reason: Error = new Error('nobody waits for this any more')): void {
    (this.signal as Stop).stop(reason);
  }
}

class Stop implements StopSignal {
  aborted = false;
  // Of no meaning until `aborted`, as an AbortSignal's.
  reason!: Error;
  readonly #listeners = new Set<() => void>();

  throwIfAborted(): void {
    if (this.aborted) throw this.reason;
  }

  addEventListener(_: 'abort', listener: () => void): void {
    if (!this.aborted) this.#listeners.add(listener);
  }

  removeEventListener(_: 'abort', listener: () => void): void {
    this.#listeners.delete(listener);
  }

  stop(reason: Error): void {
    if (this.aborted) return;
    this.aborted = true;
    this.reason = reason;
    const listeners = [...this.#listeners];
    this.#listeners.clear();
    for (const listener of listeners) listener();
  }
}

/** For what takes nothing else. */
export function abortSignalOf(signal: StopSignal): AbortSignal {
  if (signal instanceof AbortSignal) return signal;
  const controller = new AbortController();
  if (signal.aborted) controller.abort(signal.reason);
  else signal.addEventListener('abort', () => controller.abort(signal.reason), { once: true });
  return controller.signal;
}
