/**
 * What this page knows of the cluster: nodes and sandboxes. All of them are asked for at the start and now and then; between, the server's events
 * say what changed, and where an event does not say it whole, that sandbox alone is asked for. Without events the page asks more often.
 */
import { bodyChunks } from '../api/body-chunks.js';
import { path } from '../api/client.js';
import { pagesOf } from '../api/pages.js';
import { parseEvents } from '../api/sse-parser.js';
import { nodeOf } from './node.js';
import { sandboxOf } from './sandbox.js';
import { Topic } from './topic.js';
import { seen, whileSeen } from './visibility.js';

const NODES_MS = 4000;
const SANDBOXES_MS = 30_000;
const SANDBOXES_WITHOUT_EVENTS_MS = 5000;
const AGAIN_MS = 3000;
/** More sandboxes to ask for than this at once: then all. */
const MOST_SINGLE = 20;
const CHANGED_MS = 400;

/** @typedef {import('./node.js').ClusterNode} ClusterNode */
/** @typedef {import('./sandbox.js').SandboxRow} SandboxRow */

export class Cluster {
  /** @param {import('../api/client.js').ApiClient} api */
  constructor(api) {
    this.api = api;
    /** @type {ClusterNode[] | undefined} */
    this.nodes = undefined;
    /** @type {Map<string, SandboxRow> | undefined} */
    this.sandboxes = undefined;
    /** @type {string[]} */
    this.unreachable = [];
    /** There are more sandboxes than one list has. */
    this.truncated = false;
    /** @type {{ nodes?: unknown, sandboxes?: unknown }} */
    this.errors = {};
    this.live = false;
    this.nodesTopic = new Topic();
    this.sandboxesTopic = new Topic();
    this.statusTopic = new Topic();
    this.stop = new AbortController();
    /** @type {Set<string>} */
    this.changed = new Set();
    this.sandboxesAt = 0;
    this.asking = false;
  }

  start() {
    this.#every(NODES_MS, () => this.refreshNodes());
    this.#every(1000, async () => {
      const wait = this.live ? SANDBOXES_MS : SANDBOXES_WITHOUT_EVENTS_MS;
      if (Date.now() - this.sandboxesAt >= wait) await this.refreshSandboxes();
    });
    this.#every(CHANGED_MS, () => this.#askForChanged());
    void this.#listen();
  }

  end() {
    this.stop.abort();
  }

  async refreshNodes() {
    // Not for this token: asking again changes nothing.
    if (this.nodesDenied) return;
    try {
      const { nodes } = await this.api.json('/v1/nodes', { signal: this.stop.signal });
      this.nodes = nodes.map(nodeOf).sort(byEdge);
      this.errors.nodes = undefined;
    } catch (error) {
      this.errors.nodes = error;
    }
    this.nodesTopic.publish();
  }

  async refreshSandboxes() {
    if (this.asking) return;
    this.asking = true;
    try {
      const { signal } = this.stop;
      const { sandboxes, unreachable, truncated } = await pagesOf(this.api, {}, signal);
      const before = this.sandboxes;
      this.sandboxes = new Map(
        sandboxes.map((/** @type {any} */ view) => [view.id, merged(before?.get(view.id), view)]),
      );
      this.unreachable = unreachable;
      this.truncated = truncated;
      this.errors.sandboxes = undefined;
    } catch (error) {
      this.errors.sandboxes = error;
    } finally {
      this.asking = false;
      this.sandboxesAt = Date.now();
    }
    this.sandboxesTopic.publish();
  }

  get nodesDenied() {
    return /** @type {any} */ (this.errors.nodes)?.status === 403;
  }

  /** What is known at once, before the server says it. @param {any} view */
  take(view) {
    if (typeof view?.id !== 'string' || typeof view.state !== 'string') return false;
    this.sandboxes?.set(view.id, merged(this.sandboxes.get(view.id), view));
    this.sandboxesTopic.publish();
    return true;
  }

  /** @param {string} id */
  drop(id) {
    this.sandboxes?.delete(id);
    this.sandboxesTopic.publish();
  }

  async #askForChanged() {
    if (this.changed.size === 0 || this.sandboxes === undefined) return;
    const ids = [...this.changed];
    this.changed.clear();
    if (ids.length > MOST_SINGLE) return this.refreshSandboxes();
    await Promise.all(ids.map((id) => this.#askFor(id)));
  }

  /** @param {string} id */
  async #askFor(id) {
    try {
      this.take(await this.api.json(path`/v1/sandboxes/${id}`, { signal: this.stop.signal }));
    } catch (error) {
      const { status } = /** @type {any} */ (error);
      if (status === 404 || status === 410) this.drop(id);
    }
  }

  async #listen() {
    const { signal } = this.stop;
    let before = false;
    while (!signal.aborted) {
      await seen(signal);
      const looking = whileSeen(signal);
      try {
        const response = await this.api.open('/v1/events', { signal: looking.signal });
        // What happened before it began is in no event.
        if (before) this.sandboxesAt = 0;
        before = true;
        this.#setLive(true);
        for await (const { event, data } of parseEvents(bodyChunks(response))) this.#heard(event, data);
      } catch {
        // Asked again below; meanwhile the lists are asked for more often.
      }
      this.#setLive(false);
      const left = looking.signal.aborted;
      looking.end();
      if (!left) await pause(AGAIN_MS, signal);
    }
  }

  /** @param {boolean} live */
  #setLive(live) {
    if (this.live === live) return;
    this.live = live;
    this.statusTopic.publish();
  }

  /** @param {string} event @param {string} data */
  #heard(event, data) {
    let news;
    try {
      news = JSON.parse(data);
    } catch {
      return;
    }
    const kind = `${event} ${news?.type ?? ''}`;
    if (kind.includes('node')) return void this.refreshNodes();
    const view = typeof news?.sandbox === 'object' ? news.sandbox : news;
    const id = typeof news?.sandbox === 'string' ? news.sandbox : view?.id;
    if (typeof id !== 'string') return;
    if (kind.includes('gone')) return this.drop(id);
    if (!this.take({ ...view, id })) this.changed.add(id);
  }

  /** One after the other, and not while nobody looks. @param {number} ms @param {() => Promise<unknown>} work */
  async #every(ms, work) {
    const { signal } = this.stop;
    for (let first = true; !signal.aborted; first = false) {
      if (first || !document.hidden) await work();
      await pause(ms, signal);
    }
  }
}

/** Lists and events say less of one than asking for it alone. @param {SandboxRow | undefined} before @param {any} view */
function merged(before, view) {
  // Another one may have its name by now.
  const same = before !== undefined && (view.createdAt === undefined || view.createdAt === before.view.createdAt);
  return sandboxOf(same ? { ...before.view, ...view } : view);
}

/** @param {ClusterNode} a @param {ClusterNode} b */
function byEdge(a, b) {
  return a.edge.localeCompare(b.edge, 'en', { numeric: true });
}

/** @param {number} ms @param {AbortSignal} signal */
function pause(ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener('abort', end);
      resolve(undefined);
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener('abort', end);
  });
}
