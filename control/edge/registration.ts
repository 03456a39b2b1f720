/** An edge makes itself known to its watcher, again and again: a watcher that starts anew knows nobody. Without a watcher the edge serves all the same. */
import { messageOf } from '#base';
import type { PeerClient } from '../service-base/peer-client.ts';

export interface RegistrationOptions {
  readonly watcher: PeerClient;
  readonly edge: string;
  /** Where the watcher and the API servers reach the edge. */
  readonly url: string;
  readonly everyMs?: number;
  readonly onNote: (text: string) => void;
}

export class Registration {
  private readonly options: RegistrationOptions;
  private readonly stop = new AbortController();
  private timer: NodeJS.Timeout | undefined;
  private trouble: string | undefined;

  constructor(options: RegistrationOptions) {
    this.options = options;
    this.beat();
  }

  close(): void {
    this.stop.abort();
    clearTimeout(this.timer);
  }

  private async beat(): Promise<void> {
    const { watcher, edge, url, everyMs = 2000, onNote } = this.options;
    const { signal } = this.stop;
    try {
      await watcher.json({ method: 'POST', path: '/v1/edges', body: { edge, url }, signal, timeoutMs: 5000 });
      if (this.trouble !== undefined) onNote(`the watcher at ${watcher.url} knows this edge again`);
      this.trouble = undefined;
    } catch (error) {
      if (signal.aborted) return;
      const trouble = messageOf(error);
      // Once, not every two seconds.
      if (trouble !== this.trouble) onNote(`the watcher does not know this edge: ${trouble}`);
      this.trouble = trouble;
    }
    if (!signal.aborted) this.timer = setTimeout(() => this.beat(), everyMs).unref();
  }
}
