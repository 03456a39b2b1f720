/** What a queue's thread and its owner tell each other. */
import type { MessagePort } from 'node:worker_threads';

export interface QueueData {
  /** Of /dev/ublkcN. */
  readonly device: number;
  readonly queue: number;
  readonly depth: number;
  readonly maxIoBytes: number;
  /** Address of `depth` buffers of `maxIoBytes`, and of NOTE_BYTES behind them, which the owner has mapped and unmaps after the thread's end. */
  readonly buffers: number;
  /** An eventfd: raised by the owner when it has sent something. */
  readonly wake: number;
  readonly port: MessagePort;
  /** The thread answers from this file itself; without it, requests go to the owner. */
  readonly file: number | undefined;
  readonly sizeBytes: number;
  readonly readOnly: boolean;
  /** The device is one whose server copies (USER_COPY). */
  readonly copies: boolean;
}

/** What an eventfd answers. */
export const NOTE_BYTES = 8;

/** To the owner, first of all: the descriptor of the thread's ring, which the owner closes after the thread's end. */
export interface RingOpened {
  readonly ring: number;
}

/** To the owner: every tag has been offered to the kernel. */
export const READY = 'ready';

/** To the owner: a batch, five numbers a request: tag, operation, flags, offset, length. */
export type RequestBatch = number[];

/** To the thread: end, and leave the device to the next server. */
export const LEAVE = 'leave';

/** To the thread: a batch, two numbers each: tag, and a count or minus an errno. */
export type ResultBatch = number[];
