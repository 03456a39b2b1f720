/**
 * Wakes the main thread when a FUSE device has requests. Node can wait for sockets, not for /dev/fuse: so one thread of the process
 * sleeps for all devices that it serves (linux/epoll.ts), from the first one on; without a device it keeps no process alive.
 */
import type { Worker } from 'node:worker_threads';
import { spawnWorker } from '#base';
import { makeEpoll, makeEventFd, raiseEventFd, unwatch, watchOnce } from '#linux';

export interface WatchData {
  readonly epoll: number;
}

/** The tag that ends the thread. */
export const WAKE = 0;

interface Watching {
  readonly epoll: number;
  readonly worker: Worker;
}

const ready = new Map<number, () => void>();
let watching: Watching | undefined;
let lastTag = WAKE;

export class DeviceWatch {
  readonly #fd: number;
  readonly #tag = ++lastTag;
  readonly #epoll: number;
  #watched = false;

  /** `onReady` is called once for each `arm`. */
  constructor(fd: number, onReady: () => void) {
    watching ??= start();
    watching.worker.ref();
    this.#epoll = watching.epoll;
    this.#fd = fd;
    ready.set(this.#tag, onReady);
  }

  arm(): void {
    watchOnce(this.#epoll, this.#fd, this.#tag, this.#watched);
    this.#watched = true;
  }

  /** Before the descriptor is closed. */
  end(): void {
    if (!ready.delete(this.#tag)) return;
    if (this.#watched) unwatch(this.#epoll, this.#fd);
    if (ready.size === 0) watching!.worker.unref();
  }
}

function start(): Watching {
  const epoll = makeEpoll();
  const wake = makeEventFd();
  watchOnce(epoll, wake, WAKE, false);
  const data: WatchData = { epoll };
  const worker = spawnWorker('file-watch', new URL('./watch-worker.ts', import.meta.url), { workerData: data });
  worker.on('message', (tags: number[]) => {
    for (const tag of tags) ready.get(tag)?.();
  });
  // It sleeps in a system call: a process that exits would wait for it.
  process.on('exit', () => raiseEventFd(wake));
  return { epoll, worker };
}
