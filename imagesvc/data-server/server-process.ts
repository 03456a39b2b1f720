/**
 * The process that serves: the chunk cache, the store behind it, and the transport's threads. It keeps nothing that its
 * successor could not read from disk, so it may be killed at any moment. Started by the supervisor; the device's descriptor
 * is number 3. Without its supervisor it serves on, until the mount goes or a new supervisor takes over.
 */
import { messageOf } from '#base';
import { openStore } from '../store/open-store.ts';
import { remoteRangeSource } from '../store/store-range-source.ts';
import type { RecordedReads } from '../trace/trace-from-reads.ts';
import { BlobRegistry, type RegisteredBlob } from './blob-registry.ts';
import { CachedBlobs } from './cached-blobs.ts';
import { serveNative } from './native-transport.ts';
import { adoptWhenOrphaned } from './orphan.ts';
import { serveRaw } from './raw-transport.ts';
import { ReadLog } from './read-log.ts';
import type { ServedBlob } from './served-blob.ts';
import type { AddedBlob, ChunkReport, FromServer, ServerConfig, ServerStats, ToServer } from './server-messages.ts';
import type { Transport } from './transport.ts';

const FUSE_FD = 3;
const UNPIN_EVERY_MS = 60_000;

const config = JSON.parse(process.argv[2]!) as ServerConfig;
for (const signal of ['SIGINT', 'SIGHUP'] as const) process.on(signal, () => {});

let notedAtMs = Number.NEGATIVE_INFINITY;
let unnoted = 0;

const cached = await CachedBlobs.open({
  folder: config.chunks,
  // A program whose page cannot be read is ended by SIGBUS: a store that is away for a minute is worth waiting for.
  source: remoteRangeSource(await openStore(config.storeUrl), { retry: { patient: true } }),
  runDir: config.runDir,
  memoryBytes: config.memoryBytes,
  capacityBytes: config.capacityBytes,
  onFailure: noteFailure,
});
const readLog = config.record === true ? new ReadLog() : undefined;
const served = new Map<string, ServedBlob>();
const registry = new BlobRegistry(config.blobs);
for (const blob of registry.blobs) show(blob, registry.chunkDigests(blob));
const transport = await serve();
setInterval(() => cached.unpinUnused(), UNPIN_EVERY_MS).unref();
process.on('message', (message: ToServer) => void hear(message));
adoptWhenOrphaned(config, log);
tell({ event: 'ready' });
await transport.ended;
await cached.close().catch((error: unknown) => log(messageOf(error)));
process.exit(0);

async function serve(): Promise<Transport> {
  const options = { blobs: [...served.values()], reader: cached };
  if (config.transport === 'native') return serveNative({ ...options, mountPoint: config.mountPoint });
  return serveRaw({ ...options, fd: FUSE_FD, threads: config.threads });
}

function show(blob: RegisteredBlob, chunkDigests: Buffer): ServedBlob {
  const { digest, sizeBytes, node } = blob;
  const view = { ...cached.add(digest, sizeBytes, chunkDigests), log: readLog && { shared: readLog.shared, node } };
  const shown = { digest, sizeBytes, node, view };
  served.set(digest, shown);
  return shown;
}

async function hear(message: ToServer): Promise<void> {
  try {
    tell({ event: 'reply', id: message.id, value: await answer(message) });
  } catch (error) {
    tell({ event: 'failed', id: message.id, message: messageOf(error) });
  }
}

function answer(message: ToServer): unknown {
  switch (message.op) {
    case 'add':
      return add(message.blob);
    case 'stats':
      return stats();
    case 'cached':
      return cached.stored();
    case 'forget':
      return cached.forget(message.digests);
    case 'prefetch':
      return cached.prefetch(message.digest, message.ranges, () => tell({ event: 'prefetched', id: message.id }));
    case 'chunks':
      return { chunks: cached.chunks(message.digest)?.toString('base64') } satisfies ChunkReport;
    case 'recorded':
      return recorded();
  }
}

function recorded(): RecordedReads {
  if (readLog === undefined) throw new Error('it was not started to record');
  const { reads, dropped } = readLog.reads();
  const digests = new Map([...served.values()].map(({ node, digest }) => [node, digest]));
  return { reads: reads.map(({ node, ...read }) => ({ blob: digests.get(node)!, ...read })), dropped };
}

function add(blob: RegisteredBlob): AddedBlob {
  if (!served.has(blob.digest)) {
    // The supervisor has written it down before it asked.
    transport.add(show(blob, new BlobRegistry(config.blobs).chunkDigests(blob)));
  }
  return { digest: blob.digest, localPath: cached.localPath(blob.digest) };
}

function stats(): ServerStats {
  return { pid: process.pid, transport: transport.stats(), cache: cached.stats(), prefetching: cached.prefetching };
}

function tell(message: FromServer): void {
  if (process.connected) process.send?.(message);
}

/** A reader that tries on and on must not fill the disk. */
function noteFailure(blob: string, reason: string): void {
  if (performance.now() - notedAtMs < 1000) {
    unnoted++;
    return;
  }
  log(`blob ${blob}: ${reason}${unnoted > 0 ? ` (and ${unnoted} more)` : ''}`);
  notedAtMs = performance.now();
  unnoted = 0;
}

function log(text: string): void {
  process.stderr.write(`${new Date().toISOString()} server ${process.pid}: ${text}\n`);
}
