/**
 * `dsec serve watcher`: which edges there are, which of them live, and how loaded they are, for everybody who places sandboxes. It keeps nothing: one that
 * starts anew knows its configured edges at once, the others when they make themselves known again, and has asked all of them within one round.
 */
import { randomBytes } from 'node:crypto';
import { Type } from '@sinclair/typebox';
import { checkEdgeId } from '../edge/edge-state.ts';
import type { EdgeId } from '../placement/node-report.ts';
import { reportToJson } from '../placement/report-json.ts';
import type { TokenGiven } from '../service-base/cluster-token.ts';
import { parsePeerUrl } from '../service-base/peer-client.ts';
import { createService, serviceLogger } from '../service-base/service-app.ts';
import type { ClientTlsFiles, ServerTlsFiles } from '../service-base/tls-files.ts';
import type { ClusterJson, ClusterNodeJson } from './cluster-json.ts';
import { EdgePoller } from './edge-poller.ts';
import { EdgeWatch } from './edge-watch.ts';

export interface WatcherOptions {
  readonly listen: string;
  readonly tls?: ServerTlsFiles;
  readonly token?: TokenGiven;
  readonly peerTls?: ClientTlsFiles;
  readonly logLevel: string;
  /** Those that are configured, as they are now; asked again when the watcher is told to. */
  readonly edges: () => ReadonlyMap<EdgeId, string>;
  readonly pollMs?: number;
  /** An edge is dead that has not answered for so long. */
  readonly silenceMs?: number;
  /** In a row, of a dead one, before it lives again. */
  readonly answersToLive?: number;
  /** One that made itself known is forgotten when it has not done so for so long, and does not answer. */
  readonly forgetMs?: number;
}

export interface ServingWatcher {
  readonly url: string;
  cluster(): ClusterJson;
  reload(): void;
  close(drainMs: number): Promise<void>;
}

const EdgeBody = Type.Object(
  { edge: Type.String({ maxLength: 100 }), url: Type.String({ maxLength: 1000 }) },
  { additionalProperties: false },
);
const MOST_EDGES = 10_000;

/** @throws SERVICE_*, SERVER_LISTEN, WATCHER_* */
export async function serveWatcher(options: WatcherOptions): Promise<ServingWatcher> {
  const { pollMs = 1000, silenceMs = 5000, answersToLive = 3, forgetMs = 600_000 } = options;
  const logger = serviceLogger(options.logLevel);
  const service = createService({ name: 'watcher', ...options, logger, notReady: () => unheard() });
  const { app, metrics } = service;
  const watch = new EdgeWatch({ silenceMs, answersToLive });
  const clock = () => performance.now();
  const poller = new EdgePoller({
    watch,
    peer: { token: options.token, tls: options.peerTls, connectMs: silenceMs },
    everyMs: pollMs,
    // An answer that is older says no more than that the edge lived then; the polls after it say more.
    answerMs: silenceMs,
    now: clock,
    onNote: (text) => logger.warn(text),
  });
  const epoch = randomBytes(8).toString('hex');
  const startedAt = clock();
  /** When those that are not configured made themselves known last. */
  const registered = new Map<EdgeId, number>();

  // Whoever asks right after a start would take unheard edges for dead ones.
  const unheard = () => {
    const waiting = watch.status(clock()).filter(({ heard }) => !heard).length;
    const young = clock() - startedAt < silenceMs;
    return young && waiting > 0 ? `${waiting} edges have not answered yet` : undefined;
  };
  let configured: ReadonlyMap<EdgeId, string> = new Map();
  const reload = () => {
    const next = options.edges();
    for (const edge of configured.keys()) if (!next.has(edge)) poller.remove(edge);
    for (const [edge, url] of next) {
      if (poller.urlOf(edge) !== url) poller.remove(edge);
      poller.add(edge, url, true);
    }
    configured = next;
  };
  const forget = () => {
    const now = clock();
    const alive = new Set(watch.status(now).flatMap(({ edge, dead }) => (dead ? [] : [edge])));
    for (const [edge, at] of registered) {
      if (configured.has(edge)) registered.delete(edge);
      else if (now - at >= forgetMs && !alive.has(edge)) {
        registered.delete(edge);
        poller.remove(edge);
      }
    }
  };
  const cluster = (): ClusterJson => {
    const now = clock();
    const reports = new Map(watch.reports(now).map((report) => [report.edge, report]));
    const nodes = watch.status(now).map(({ edge, dead, heardAt }): ClusterNodeJson => {
      const report = reports.get(edge);
      return {
        edge,
        url: poller.urlOf(edge) ?? '',
        labels: [...(report?.labels ?? [])],
        report: report === undefined ? undefined : reportToJson(report),
        heardMsAgo: heardAt === undefined ? undefined : Math.round(now - heardAt),
        alive: !dead,
      };
    });
    return { epoch, upMs: Math.round(now - startedAt), atMs: Date.now(), nodes };
  };

  app.get('/v1/cluster', { config: { hot: true } }, async () => cluster());
  app.post('/v1/edges', { config: { hot: true }, schema: { body: EdgeBody } }, async ({ body }) => {
    const edge = checkEdgeId(body.edge);
    parsePeerUrl(body.url);
    if (!registered.has(edge) && registered.size >= MOST_EDGES) throw new Error(`more than ${MOST_EDGES} edges`);
    if (!configured.has(edge)) {
      registered.set(edge, clock());
      if (poller.add(edge, body.url, false)) logger.info({ edge, url: body.url }, 'edge');
    }
    return { edge, url: poller.urlOf(edge) };
  });
  metrics.gauge('dsec_watcher_edges', 'Edges by what is known of them.', () => {
    const all = watch.status(clock());
    const dead = all.filter((one) => one.dead).length;
    return [
      [{ state: 'alive' }, all.length - dead],
      [{ state: 'dead' }, dead],
    ];
  });
  metrics.total('dsec_watcher_polls_total', 'Polls of the edges that are watched now.', () => {
    const { polls, failures } = poller.counts();
    return [
      [{ result: 'answered' }, polls - failures],
      [{ result: 'lost' }, failures],
    ];
  });

  reload();
  const forgetting = setInterval(forget, Math.min(60_000, forgetMs)).unref();
  const close = async (drainMs: number) => {
    clearInterval(forgetting);
    poller.close();
    await service.close(drainMs);
  };
  try {
    const url = await service.listen();
    return {
      url,
      cluster,
      reload() {
        service.reload();
        reload();
      },
      close,
    };
  } catch (error) {
    await close(0);
    throw error;
  }
}
