/**
 * `dsec trace`: runs a command in a sandbox on lazy mounts of its own, has the data server note every read, and makes a trace
 * of each image that took part. Nothing is kept here: that is the caller's, who knows whether the start was a good one.
 */
import type { Digest } from '#base';
import {
  type DataServerPrograms,
  type ErofsLayer,
  ensureDataServer,
  type Image,
  type Trace,
  traceFromReads,
} from '#imagesvc';
import { fail } from '../errors.ts';
import { type RunOptions, type RunResult, runContainer } from '../sandbox/run-container.ts';
import { runtimeFolders } from '../sandbox/state-folders.ts';
import { reclaimTraces, TraceNode } from './trace-node.ts';

export interface TraceRunOptions
  extends Omit<RunOptions, 'name' | 'keep' | 'replace' | 'lazy' | 'prefetch' | 'onStarted'> {
  /** The sandbox is ended (SIGKILL) this long after its start: for what would not end by itself. */
  readonly stopAfterMs?: number;
  /** See DataServerOptions. */
  readonly programs?: DataServerPrograms;
}

export interface TracedRun {
  readonly result: RunResult;
  /** It ended because `stopAfterMs` was over. */
  readonly stopped: boolean;
  /** Of the base, the workspace and the toolkits. */
  readonly traces: readonly { readonly image: Image; readonly trace: Trace }[];
}

/** @throws what runContainer throws, RUNTIME_TRACE_INTERRUPTED; nothing is left then */
export async function traceRun(options: TraceRunOptions): Promise<TracedRun> {
  if (process.geteuid?.() !== 0) throw fail('RUNTIME_NEEDS_ROOT');
  const { store, base, workspace, toolkits = [], stopAfterMs, programs, signal, ...rest } = options;
  const node = runtimeFolders(options.folders);
  await reclaimTraces(node);
  const own = TraceNode.make(node);
  const { folders } = own;
  const ending = new AbortController();
  let timer: NodeJS.Timeout | undefined;
  try {
    const server = await ensureDataServer(store.url, { ...folders, programs, record: true });
    const result = await runContainer({
      ...rest,
      store,
      base,
      workspace,
      toolkits,
      folders,
      lazy: true,
      prefetch: false,
      signal: signal === undefined ? ending.signal : AbortSignal.any([signal, ending.signal]),
      onStarted: () => {
        if (stopAfterMs !== undefined) timer = setTimeout(() => ending.abort(), stopAfterMs);
      },
    });
    signal?.throwIfAborted();
    const { restarts } = await server.status();
    // What it had noted died with it.
    if (restarts > 0) throw fail('RUNTIME_TRACE_INTERRUPTED', { image: base.name });
    const reads = await server.recorded();
    const traces: { image: Image; trace: Trace }[] = [];
    const parts = [
      { image: base, layers: base.layers },
      ...[workspace, ...toolkits].flatMap((image) =>
        image === undefined ? [] : [{ image, layers: ownLayers(image) }],
      ),
    ];
    const taken = new Set<Digest>();
    for (const { image, layers } of parts) {
      // A layer that several have is the first one's, as in the sandbox.
      const blobs = new Set(layers.flatMap(dataOf).filter((digest) => !taken.has(digest)));
      for (const digest of blobs) taken.add(digest);
      traces.push({ image, trace: await traceFromReads(store, image, options.command, reads, blobs) });
    }
    return { result, stopped: ending.signal.aborted, traces };
  } finally {
    clearTimeout(timer);
    await own.remove();
  }
}

function ownLayers({ layers, ownLayers: count }: Image): readonly ErofsLayer[] {
  return layers.slice(layers.length - count);
}

function dataOf({ devices }: ErofsLayer): Digest[] {
  return devices.map(({ blob }) => blob.digest);
}
