/**
 * Has another process do what may wait for a disk that this process serves (device-process.ts says why). One that is at work on an order
 * takes no other: the next order gets another process. An idle one is kept for a moment, since orders come together.
 */
import { type ChildProcess, fork } from 'node:child_process';
import { processEntry } from '#base';
import { fail } from '../../errors.ts';

export type Order =
  | { readonly do: 'attach-loop'; readonly path: string; readonly readOnly: boolean; readonly blockSize: number }
  | { readonly do: 'detach-loop'; readonly path: string }
  /** Nothing: the process for the next order has started, which on a busy machine takes a while. */
  | { readonly do: 'start'; readonly path: string }
  /** Whether nobody else holds the device: EBUSY. */
  | { readonly do: 'claim'; readonly path: string }
  | { readonly do: 'unmount'; readonly path: string; readonly lazy: boolean };

export interface Outcome {
  readonly value?: string;
  readonly error?: string;
  /** Of the system. */
  readonly code?: string;
}

const WHAT = {
  'attach-loop': 'make a loop device of it',
  'detach-loop': 'free it',
  claim: 'see who uses it',
  start: 'start a process for it',
  unmount: 'unmount it',
} as const;
const IDLE_MS = 2000;

let idle: { readonly child: ChildProcess; readonly timer: NodeJS.Timeout } | undefined;

/** What the order gives; undefined: it was refused with a code that the caller expects. @throws FILE_DEVICE */
export async function carryOut(order: Order, expected: readonly string[] = []): Promise<string | undefined> {
  const refused = (reason: string) => fail('FILE_DEVICE', { path: order.path, what: WHAT[order.do], reason });
  const { value, error, code } = await outcomeOf(order, refused);
  if (value !== undefined) return value;
  if (code !== undefined && expected.includes(code)) return undefined;
  throw refused(error ?? 'no reason given');
}

function outcomeOf(order: Order, refused: (reason: string) => Error): Promise<Outcome> {
  const child = takeChild();
  return new Promise((done, failed) => {
    const onError = (error: Error) => failed(refused(error.message));
    const onExit = (status: number | null, signal: string | null) =>
      failed(refused(`the process for it ended with ${signal ?? status}`));
    child.once('error', onError).once('exit', onExit);
    child.once('message', (outcome: Outcome) => {
      child.off('error', onError).off('exit', onExit);
      keepChild(child);
      done(outcome);
    });
    child.send(order, (error) => {
      if (error !== null) onError(error);
    });
  });
}

function takeChild(): ChildProcess {
  if (idle !== undefined) {
    const { child, timer } = idle;
    idle = undefined;
    clearTimeout(timer);
    child.removeAllListeners('exit');
    child.ref();
    child.channel?.ref();
    return child;
  }
  const [program, ...args] = processEntry('file-device', new URL('./device-process.ts', import.meta.url));
  return fork(program!, args, { execArgv: [], stdio: ['ignore', 'ignore', 'inherit', 'ipc'] });
}

function keepChild(child: ChildProcess): void {
  if (idle !== undefined) {
    child.disconnect();
    return;
  }
  // It keeps this process from ending no longer than an order takes, and ends with it.
  child.unref();
  child.channel?.unref();
  const timer = setTimeout(() => {
    idle = undefined;
    child.disconnect();
  }, IDLE_MS);
  timer.unref();
  idle = { child, timer };
  child.once('exit', () => {
    if (idle?.child !== child) return;
    clearTimeout(timer);
    idle = undefined;
  });
}
