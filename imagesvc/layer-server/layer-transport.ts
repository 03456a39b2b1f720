/**
 * The layer server's main thread: starts the threads that read /dev/fuse, opens layers, and answers what has to wait.
 * Opened is what somebody asks for: a server that takes over from a dead one knows all layers and opens none.
 */
import { availableParallelism } from 'node:os';
import { MessageChannel, type MessagePort, type Worker } from 'node:worker_threads';
import { spawnWorker } from '#base';
import { fuse } from '#linux';
import { COUNTER, COUNTERS } from '../data-server/raw-messages.ts';
import { endOf, statsOf } from '../data-server/raw-transport.ts';
import type { TransportStats } from '../data-server/transport.ts';
import { layerNumberOf, type OpenedLayer, ROOT_NODE } from './layer-facts.ts';
import { errnoOf, LATER, LayerFilesSystem } from './layer-files-system.ts';
import type { LayerWorkerData } from './layer-messages.ts';

const {
  decodeHeader,
  decodeName,
  emptyHeader,
  ERRNO,
  MAX_READ_BYTES,
  OPCODE,
  readLength,
  readOffset,
  sendBody,
  sendBytes,
} = fuse;
type RequestHeader = fuse.RequestHeader;

export interface LayerTransportOptions {
  readonly fd: number;
  readonly threads?: number;
  /** Opens a layer by its number, or by its name in hex digits; undefined: there is none. */
  open(layer: number | string): Promise<OpenedLayer> | undefined;
  /** Told of every request that failed for another reason than its own. */
  onFailure?(error: unknown): void;
}

export class LayerTransport {
  /** When the file system is unmounted. */
  readonly ended: Promise<void>;
  readonly #options: LayerTransportOptions;
  readonly #system = new LayerFilesSystem();
  readonly #ports: MessagePort[] = [];
  readonly #counters: SharedArrayBuffer;
  readonly #count: Float64Array;
  readonly #shown = new WeakSet<OpenedLayer>();

  constructor(options: LayerTransportOptions) {
    this.#options = options;
    // Names and attributes come from memory, and data from local files: as many threads as there are processors.
    const many = options.threads ?? Math.min(4, Math.max(2, availableParallelism()));
    this.#counters = new SharedArrayBuffer((many + 1) * COUNTERS * 8);
    this.#count = new Float64Array(this.#counters);
    const workers = Array.from({ length: many }, (_, index) => this.#startWorker(index + 1));
    this.ended = Promise.all(workers.map(endOf)).then(() => {
      for (const port of this.#ports) port.close();
    });
    // Whoever does not wait for the end must not fall over it.
    this.ended.catch(() => {});
  }

  #startWorker(row: number): Worker {
    const { port1, port2 } = new MessageChannel();
    this.#ports.push(port1);
    port1.unref();
    const data: LayerWorkerData = { fd: this.#options.fd, layers: [], counters: this.#counters, row };
    const worker = spawnWorker('layer-server-worker', new URL('./layer-worker.ts', import.meta.url), {
      workerData: { ...data, port: port2 },
      transferList: [port2],
    });
    worker.on('message', (request: Uint8Array) => void this.#answer(Buffer.from(request.buffer)));
    return worker;
  }

  /** Shows what was opened, to all threads. */
  add(layer: OpenedLayer): void {
    if (this.#shown.has(layer)) return;
    this.#shown.add(layer);
    this.#system.add(layer);
    for (const port of this.#ports) port.postMessage(layer);
  }

  stats(): TransportStats {
    return statsOf(this.#count);
  }

  async #answer(request: Buffer): Promise<void> {
    const header = emptyHeader();
    decodeHeader(request, header);
    const scratch = Buffer.allocUnsafe(header.opcode === OPCODE.READ ? 32 * 1024 : MAX_READ_BYTES);
    const { fd } = this.#options;
    try {
      if (!(await this.#open(header, request))) {
        sendBody(fd, scratch, header, header.node === ROOT_NODE ? -ERRNO.ENOENT : -ERRNO.EIO);
        return;
      }
      if (header.opcode === OPCODE.READ) {
        this.#count[COUNTER.reads]! += 1;
        const wanted = Math.min(readLength(request), MAX_READ_BYTES);
        const bytes = await this.#system.read(header.node, readOffset(request), wanted);
        this.#count[COUNTER.readBytes]! += bytes.length;
        sendBytes(fd, scratch, header, bytes);
        return;
      }
      const result = this.#system.answer(header, request, scratch);
      sendBody(fd, scratch, header, result === LATER ? -ERRNO.EIO : result);
    } catch (error) {
      this.#count[COUNTER.failures]! += 1;
      this.#options.onFailure?.(error);
      sendBody(fd, scratch, header, -errnoOf(error));
    }
  }

  /** Sees to it that the layer that the request is about is open. False: there is no such layer. */
  async #open(header: RequestHeader, request: Buffer): Promise<boolean> {
    const asked = header.node === ROOT_NODE ? decodeName(request, header.lengthBytes) : layerNumberOf(header.node);
    if (typeof asked === 'number' && this.#system.has(asked)) return true;
    const opening = this.#options.open(asked);
    if (opening === undefined) return false;
    this.add(await opening);
    return true;
  }
}
