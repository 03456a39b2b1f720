/**
 * FUSE spoken directly on /dev/fuse: worker threads take requests and answer what is there at once; the main thread
 * fetches the rest and writes those answers itself, which any thread may do.
 *
 * `connectFuse` is the supervisor's half: the device, mounted (linux/fuse/connect.ts). `serveRaw` is the server's.
 * The device is shared by all threads and by one server after another; the kernel gives each request to one reader.
 */
import { availableParallelism } from 'node:os';
import { MessageChannel, type MessagePort, type Worker } from 'node:worker_threads';
import { messageOf, spawnWorker } from '#base';
import { fuse, MS } from '#linux';
import { fail } from '../errors.ts';
import { READ_AHEAD_KIB, setReadAheadOf } from '../mount/read-ahead.ts';
import { COUNTER, COUNTERS, type RawWorkerData, type ReadMessage } from './raw-messages.ts';
import type { BlobReader, ServedBlob } from './served-blob.ts';
import type { Transport, TransportOptions, TransportStats } from './transport.ts';

const { COPIED_BYTES, ERRNO, REPLY_BODY, sendBody, sendBytes } = fuse;

/** Blobs: flat files that nobody runs. */
const FLAT_FILES: fuse.FuseShape = {
  initFlags: () => ({ flags: 0, flags2: 0 }),
  mountFlags: MS.RDONLY | MS.NOSUID | MS.NODEV | MS.NOEXEC,
};

/**
 * Mounts at `mountPoint` and answers the kernel's first request. Nothing is served yet.
 * @throws DATA_FUSE_UNAVAILABLE
 */
export function connectFuse(mountPoint: string, source: string, shape = FLAT_FILES): fuse.FuseConnection {
  try {
    const connection = fuse.connectFuse(mountPoint, source, shape);
    setReadAheadOf(connection.device, READ_AHEAD_KIB);
    return connection;
  } catch (error) {
    throw fail('DATA_FUSE_UNAVAILABLE', { reason: messageOf(error) }, error);
  }
}

export interface RawOptions extends TransportOptions {
  readonly fd: number;
  /** As many as there are processors by default, 2 to 4: more only get in each other's way. */
  readonly threads?: number;
}

export function serveRaw(options: RawOptions): Transport {
  return new RawTransport(options);
}

class RawTransport implements Transport {
  readonly kind = 'raw';
  readonly ended: Promise<void>;
  readonly #fd: number;
  readonly #reader: BlobReader;
  readonly #blobs = new Map<number, ServedBlob>();
  readonly #ports: MessagePort[] = [];
  readonly #counters: SharedArrayBuffer;
  readonly #count: Float64Array;
  readonly #scratch = Buffer.alloc(REPLY_BODY + COPIED_BYTES, 1);

  constructor({ fd, blobs, reader, threads }: RawOptions) {
    this.#fd = fd;
    this.#reader = reader;
    for (const blob of blobs) this.#blobs.set(blob.node, blob);
    const workers: Worker[] = [];
    const many = threads ?? Math.min(4, Math.max(2, availableParallelism()));
    this.#counters = new SharedArrayBuffer((many + 1) * COUNTERS * 8);
    this.#count = new Float64Array(this.#counters);
    for (let i = 1; i <= many; i++) workers.push(this.#startWorker(blobs, i));
    this.ended = Promise.all(workers.map(endOf)).then(() => {
      for (const port of this.#ports) port.close();
    });
    // Whoever does not wait for the end must not fall over it.
    this.ended.catch(() => {});
  }

  #startWorker(blobs: readonly ServedBlob[], row: number): Worker {
    const { port1, port2 } = new MessageChannel();
    this.#ports.push(port1);
    port1.unref();
    const data: RawWorkerData = { fd: this.#fd, blobs, counters: this.#counters, row };
    const worker = spawnWorker('raw-worker', new URL('./raw-worker.ts', import.meta.url), {
      workerData: { ...data, port: port2 },
      transferList: [port2],
    });
    worker.on('message', (message: ReadMessage) => void this.#fetch(message));
    return worker;
  }

  add(blob: ServedBlob): void {
    if (this.#blobs.has(blob.node)) return;
    this.#blobs.set(blob.node, blob);
    for (const port of this.#ports) port.postMessage(blob);
  }

  stats(): TransportStats {
    return statsOf(this.#count);
  }

  async #fetch([uniqueLow, uniqueHigh, node, offset, length]: ReadMessage): Promise<void> {
    this.#count[COUNTER.reads]! += 1;
    let bytes: Buffer | undefined;
    try {
      bytes = await this.#reader.read(this.#blobs.get(node)!, offset, length);
      // Fewer would be shown as zeros behind them.
      if (bytes.length !== length) bytes = undefined;
    } catch {
      // The reader has told whoever watches it; the kernel only takes a number.
    }
    const asked = { uniqueLow, uniqueHigh };
    if (bytes === undefined) {
      this.#count[COUNTER.failures]! += 1;
      sendBody(this.#fd, this.#scratch, asked, -ERRNO.EIO);
    } else {
      this.#count[COUNTER.readBytes]! += length;
      sendBytes(this.#fd, this.#scratch, asked, bytes);
    }
  }
}

/** The sum of all threads' rows. */
export function statsOf(count: Float64Array): TransportStats {
  const rows: number[][] = [];
  for (let at = 0; at < count.length; at += COUNTERS) rows.push([...count.subarray(at, at + COUNTERS)]);
  const of = (index: number) => rows.reduce((sum, row) => sum + row[index]!, 0);
  return {
    reads: of(COUNTER.reads),
    hits: of(COUNTER.hits),
    failures: of(COUNTER.failures),
    readBytes: of(COUNTER.readBytes),
    resent: of(COUNTER.resent),
    largestReadBytes: Math.max(...rows.map((row) => row[COUNTER.largestReadBytes]!)),
  };
}

/** A thread ends by itself when the mount does; any other end is the server's. */
export function endOf(worker: Worker): Promise<void> {
  return new Promise((ended, failed) => {
    worker.once('error', failed);
    worker.once('exit', (code) => (code === 0 ? ended() : failed(new Error(`a serving thread ended with ${code}`))));
  });
}
