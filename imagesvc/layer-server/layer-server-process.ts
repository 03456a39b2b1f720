/**
 * The process that serves EROFS layers as trees: what may be killed. All that it knows is on disk (layer-registry.ts), and
 * the device belongs to the supervisor, as with the data server's blobs.
 */
import { hexOf, messageOf } from '#base';
import { adoptWhenOrphaned } from '../data-server/orphan.ts';
import type { FromServer, ServerConfig, ServerStats, ToServer } from '../data-server/server-messages.ts';
import { nodeFolders } from '../mount/node-folders.ts';
import type { OpenedLayer, RegisteredLayer } from './layer-facts.ts';
import { LayerRegistry } from './layer-registry.ts';
import { LayerTransport } from './layer-transport.ts';
import { isCurrent, openLayerOnce } from './open-layer-files.ts';

const FUSE_FD = 3;

const config = JSON.parse(process.argv[2]!) as ServerConfig;
for (const signal of ['SIGINT', 'SIGHUP'] as const) process.on(signal, () => {});

const layers = new Map<number, RegisteredLayer>();
const names = new Map<string, number>();
const opened = new Map<number, Promise<OpenedLayer>>();
let notedAtMs = Number.NEGATIVE_INFINITY;

for (const layer of new LayerRegistry(config.blobs).layers) know(layer);
const transport = new LayerTransport({
  fd: FUSE_FD,
  threads: config.threads,
  open(layer) {
    const number = typeof layer === 'number' ? layer : names.get(layer);
    return number === undefined || !layers.has(number) ? undefined : open(number);
  },
  onFailure: noteFailure,
});
process.on('message', (message: ToServer) => void hear(message));
adoptWhenOrphaned(config, log);
tell({ event: 'ready' });
await transport.ended;
process.exit(0);

function know(layer: RegisteredLayer): void {
  layers.set(layer.number, layer);
  names.set(hexOf(layer.meta.digest), layer.number);
}

/** Once; what failed is tried again by the next who asks. */
function open(number: number): Promise<OpenedLayer> {
  let opening = opened.get(number);
  if (opening === undefined) {
    opening = openLayerOnce(layers.get(number)!, nodeFolders({ cacheDir: config.cacheDir }).cacheDir);
    opened.set(number, opening);
    opening.catch(() => opened.delete(number));
  }
  return opening;
}

async function hear(message: ToServer): Promise<void> {
  try {
    tell({ event: 'reply', id: message.id, value: message.op === 'add-layer' ? await add(message.layer) : stats() });
  } catch (error) {
    tell({ event: 'failed', id: message.id, message: messageOf(error) });
  }
}

/** Anew, where its files have been replaced: a data server that was started afresh shows others. */
async function add(layer: RegisteredLayer): Promise<null> {
  know(layer);
  const before = await opened.get(layer.number);
  if (before !== undefined && !isCurrent(before, layer)) opened.delete(layer.number);
  transport.add(await open(layer.number));
  return null;
}

function stats(): ServerStats {
  return { pid: process.pid, transport: transport.stats(), cache: { layers: opened.size } };
}

function tell(message: FromServer): void {
  if (process.connected) process.send?.(message);
}

/** A reader that tries on and on must not fill the disk. */
function noteFailure(error: unknown): void {
  if (performance.now() - notedAtMs < 1000) return;
  notedAtMs = performance.now();
  log(messageOf(error));
}

function log(text: string): void {
  process.stderr.write(`${new Date().toISOString()} layer server ${process.pid}: ${text}\n`);
}
