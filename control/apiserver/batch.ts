/**
 * Many sandboxes by one request: a line of JSON for each as it becomes ready, in whatever order. A bounded number is under way at once; a reader
 * that is slow holds new ones back, and one that has gone stops what has not begun.
 */
import { setMaxListeners } from 'node:events';
import { Readable } from 'node:stream';
import { fail } from '../errors.ts';
import { errorBody, serviceErrorOf } from '../service-base/service-errors.ts';
import type { Caller, SandboxMaker } from './create-sandbox.ts';
import { type CreateAsked, MOST_IN_BATCH } from './request-schemas.ts';

export interface BatchAsked {
  readonly request?: CreateAsked;
  readonly count?: number;
  readonly requests?: readonly CreateAsked[];
}

/** The `at`-th of a batch. */
export interface Batch {
  readonly size: number;
  at(at: number): CreateAsked;
}

/** The same for all of them. */
class Patient implements Caller {
  readonly identity: Caller['identity'];
  readonly requestId: string;
  readonly patient = true;
  private readonly caller: Caller;

  constructor(caller: Caller) {
    this.caller = caller;
    this.identity = caller.identity;
    this.requestId = caller.requestId;
  }

  get isGone(): boolean {
    return this.caller.isGone;
  }

  get gone(): AbortSignal {
    return this.caller.gone;
  }
}

const AT_ONCE = 1024;
/** Lines that wait for the reader. */
const WAITING = 4096;

/** @throws SERVICE_BAD_REQUEST */
export function batchOf({ request, count, requests }: BatchAsked): Batch {
  if (requests !== undefined && request === undefined && count === undefined) {
    return { size: requests.length, at: (at) => requests[at]! };
  }
  if (request === undefined || requests !== undefined) {
    throw fail('SERVICE_BAD_REQUEST', { problem: 'a batch is {request, count} or {requests}' });
  }
  const size = count ?? 1;
  const { name, requestId } = request;
  if (size > MOST_IN_BATCH) throw fail('SERVICE_BAD_REQUEST', { problem: `at most ${MOST_IN_BATCH} at once` });
  return {
    size,
    // Asked for again, each is the same one.
    at: (at) => ({
      ...request,
      name: name === undefined ? undefined : `${name.slice(0, 56)}-${at}`,
      requestId: requestId === undefined ? undefined : `${requestId}#${at}`,
    }),
  };
}

export function batchLines(maker: SandboxMaker, caller: Caller, batch: Batch): Readable {
  // As many as wait for their turn listen to it.
  setMaxListeners(0, caller.gone);
  return Readable.from(linesOf(maker, new Patient(caller), batch), { objectMode: false });
}

async function* linesOf(maker: SandboxMaker, caller: Caller, batch: Batch): AsyncGenerator<string> {
  let lines: string[] = [];
  let next = 0;
  let running = 0;
  let wake = () => {};
  const one = async (index: number) => {
    const told = await answerTo(maker, caller, batch, index);
    lines.push(`${JSON.stringify(told)}\n`);
    running--;
    wake();
  };
  while (next < batch.size || running > 0 || lines.length > 0) {
    while (running < AT_ONCE && next < batch.size && lines.length < WAITING && !caller.isGone) {
      running++;
      void one(next++);
    }
    if (lines.length > 0) {
      const text = lines.join('');
      lines = [];
      yield text;
    } else if (running > 0) {
      await new Promise<void>((resolve) => {
        wake = resolve;
      });
    } else return;
  }
}

async function answerTo(maker: SandboxMaker, caller: Caller, batch: Batch, index: number): Promise<object> {
  try {
    return { index, sandbox: await maker.create(caller, batch.at(index)) };
  } catch (error) {
    return { index, ...errorBody(serviceErrorOf(error), caller.requestId) };
  }
}
