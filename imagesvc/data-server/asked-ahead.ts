/**
 * What a supervisor was asked to have fetched ahead and is not known to be over, so that the server after a dead one is asked too.
 * What that one finds in the cache costs it nothing. A request that servers die of again and again is given up: readers fetch
 * for themselves.
 */
import type { ToServer } from './server-messages.ts';

const MOST_REQUESTS = 256;
const MOST_SERVERS = 8;

export class AskedAhead {
  readonly #requests = new Map<number, { readonly message: ToServer; servers: number }>();

  /** Beyond a bound the oldest is forgotten. */
  note(message: ToServer): void {
    const [oldest] = this.#requests.keys();
    if (this.#requests.size >= MOST_REQUESTS && oldest !== undefined) this.#requests.delete(oldest);
    this.#requests.set(message.id, { message, servers: 1 });
  }

  over(id: number): void {
    this.#requests.delete(id);
  }

  /** What the next server is to be asked. */
  forNextServer(): ToServer[] {
    for (const [id, request] of this.#requests) if (++request.servers > MOST_SERVERS) this.#requests.delete(id);
    return [...this.#requests.values()].map(({ message }) => message);
  }
}
