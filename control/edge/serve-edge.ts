/**
 * `dsec serve edge`: a node of a cluster. It is the machine's runtime service as well (the same lock, the same sockets for `dsec run` and `dsec sandbox`), so
 * there is one process that owns the machine's sandboxes, whoever asked for them; beside a `dsec serve runtime` it does not start.
 *
 * Its end, by whatever means, ends no sandbox: the keeper holds them, and the next edge or runtime service takes them over.
 */
import { join } from 'node:path';
import { defaultStoreUrl } from '#imagesvc';
import { listSandboxes, runtimeFolders } from '#runtime';
import { fail } from '../errors.ts';
import type { GpusOfTasks } from '../fncall/fncall-host.ts';
import type { ServiceSelf } from '../runtime-service/servable.ts';
import { RuntimeService } from '../runtime-service/service.ts';
import type { TokenGiven } from '../service-base/cluster-token.ts';
import { PeerClient } from '../service-base/peer-client.ts';
import { createService, serviceLogger } from '../service-base/service-app.ts';
import type { ClientTlsFiles, ServerTlsFiles } from '../service-base/tls-files.ts';
import type { AdmissionLimits } from './admission.ts';
import { edgeApp } from './edge-app.ts';
import { EdgeNode } from './edge-node.ts';
import { EdgeStateFile } from './edge-state.ts';
import { type GpuCard, GpuCards, gpuLabel } from './gpu-cards.ts';
import { Ledger } from './ledger.ts';
import { OperationLog } from './operation-log.ts';
import { PressureGauge } from './pressure.ts';
import { Registration } from './registration.ts';

export interface EdgeOptions {
  readonly self: ServiceSelf;
  readonly listen: string;
  readonly tls?: ServerTlsFiles;
  readonly token?: TokenGiven;
  readonly logLevel: string;
  /** The machine's name by default. */
  readonly id?: string;
  readonly labels: readonly string[];
  readonly cards?: readonly GpuCard[];
  /** Of graphics processors that sandboxes do not get: instances by default. */
  readonly gpusOfTasks?: GpusOfTasks;
  /** `stateDir` is where sandboxes' changes lie. */
  readonly limits: (stateDir: string) => AdmissionLimits;
  readonly storeUrl?: string;
  readonly keepEndedMs: number;
  readonly watcherUrl?: string;
  readonly peerTls?: ClientTlsFiles;
  /** Where others reach it, if not where it listens. */
  readonly advertise?: string;
}

export interface ServingEdge {
  readonly id: string;
  readonly url: string;
  readonly node: EdgeNode;
  /** Commands of `dsec run` that are served at the moment; they end with it. */
  readonly busy: number;
  reload(): void;
  close(drainMs: number): Promise<void>;
}

/** @throws SERVE_NEEDS_ROOT, SERVE_NO_LAUNCHER, SERVE_RUNS_ALREADY, EDGE_ID, EDGE_STATE, EDGE_CAPACITY, SERVICE_*, SERVER_LISTEN */
export async function serveEdge(options: EdgeOptions): Promise<ServingEdge> {
  const { stateDir } = runtimeFolders();
  const logger = serviceLogger(options.logLevel);
  const onNote = (text: string) => logger.warn(text);
  const service = createService({ name: 'edge', bodyLimitBytes: 8 << 20, ...options, logger });
  const watcher =
    options.watcherUrl === undefined
      ? undefined
      : new PeerClient({ url: options.watcherUrl, token: options.token, tls: options.peerTls, connections: 1 });
  const { self, storeUrl } = options;
  const { gpusOfTasks = 'instances' } = options;
  const runtime = await RuntimeService.start({ self, note: onNote, storeUrl, gpusOfTasks });
  let node: EdgeNode | undefined;
  let registration: Registration | undefined;
  const close = async (drainMs: number) => {
    registration?.close();
    await watcher?.close();
    // First what others ask for, as that needs the node.
    await service.close(drainMs);
    node?.close();
    await runtime.close(drainMs);
  };
  try {
    const folder = join(stateDir, 'edge');
    const state = EdgeStateFile.open(folder, options.id, () =>
      listSandboxes().some(({ resident }) => resident !== undefined),
    );
    const kinds = (options.cards ?? []).map(({ kind }) => gpuLabel(kind));
    const labels = [...new Set([...options.labels, ...kinds])];
    const ledger = new Ledger({ edge: state.id, labels, limits: options.limits(stateDir) });
    ledger.draining = state.draining;
    const operations = new OperationLog(join(folder, 'operations'));
    const edge = new EdgeNode({
      node: runtime.sandboxes,
      ledger,
      gauge: new PressureGauge({ stateDir }),
      cards: new GpuCards(options.cards),
      keepEndedMs: options.keepEndedMs,
      noteDraining: (on) => state.noteDraining(on),
      onNote,
      tasks: () => runtime.fncall.use,
      onSweep: (beforeMs) => operations.sweep(beforeMs, (name) => edge.has(name)),
    });
    node = edge;
    await edgeApp(service, {
      edge,
      operations,
      fncall: runtime.fncall,
      storeUrl: options.storeUrl ?? defaultStoreUrl(),
    });
    const url = await service.listen();
    if (watcher !== undefined) {
      registration = new Registration({ watcher, edge: state.id, url: advertised(options.advertise ?? url), onNote });
    }
    logger.info({ edge: state.id, url, epoch: ledger.epoch, sandboxes: edge.list().length }, 'edge');
    return {
      id: state.id,
      url,
      node: edge,
      get busy() {
        return runtime.busy;
      },
      reload: () => service.reload(),
      close,
    };
  } catch (error) {
    await close(0);
    throw error;
  }
}

/** @throws EDGE_ADVERTISE */
function advertised(url: string): string {
  if (/^https?:\/\/(?:0\.0\.0\.0|\[::\])[:/]/.test(url)) throw fail('EDGE_ADVERTISE', { url });
  return url;
}
