/**
 * One HTTP request over undici's connections, its body given to the caller piece by piece as it comes from the socket. A stream in
 * between would cost more than everything else that a ranged read does here (twice the processor time for 256 KiB, measured).
 */
import type { Dispatcher } from 'undici';
import type { StopSignal } from '#base';

export interface HttpResponse {
  readonly status: number;
  header(name: string): string | undefined;
  readonly body: ResponseBody;
}

export interface HttpRequest {
  readonly origin: string;
  readonly path: string;
  readonly method: 'GET' | 'HEAD';
  readonly headers: Record<string, string>;
  readonly headersTimeout: number;
  readonly bodyTimeout: number;
}

/** Once the answer has begun. @throws what undici throws, or the signal's reason */
export function exchange(agent: Dispatcher, request: HttpRequest, signal: StopSignal): Promise<HttpResponse> {
  return new Promise((begun, failed) => {
    let controller: Dispatcher.DispatchController | undefined;
    let body: ResponseBody | undefined;
    const over = (error?: Error) => {
      signal.removeEventListener('abort', onAbort);
      if (body !== undefined) body.end(error);
      else failed(error ?? new Error('the request ended without an answer'));
    };
    const onAbort = () => {
      controller?.abort(signal.reason);
      over(signal.reason);
    };
    signal.throwIfAborted();
    signal.addEventListener('abort', onAbort, { once: true });
    agent.dispatch(request, {
      onRequestStart(started) {
        controller = started;
        if (signal.aborted) started.abort(signal.reason);
      },
      onResponseStart(started, status, headers) {
        // 100 and the like come before the answer.
        if (status < 200) return;
        body = new ResponseBody(started);
        const header = (name: string) => {
          const value = headers[name];
          return Array.isArray(value) ? value.join(', ') : value;
        };
        begun({ status, header, body });
      },
      onResponseData: (_, piece) => body?.push(piece),
      onResponseEnd: () => over(),
      onResponseError: (_, error) => over(error),
    });
  });
}

/** What nobody has taken yet; then the connection waits. */
const MOST_WAITING_BYTES = 512 * 1024;

export class ResponseBody {
  readonly #controller: Dispatcher.DispatchController;
  #waiting: Buffer[] = [];
  #waitingBytes = 0;
  #take: ((piece: Buffer) => boolean) | undefined;
  #ended = false;
  #error: Error | undefined;
  #onEnd: (() => void) | undefined;

  constructor(controller: Dispatcher.DispatchController) {
    this.#controller = controller;
  }

  /** All of it has come, or failed. */
  get ended(): boolean {
    return this.#ended;
  }

  push(piece: Buffer): void {
    if (this.#take !== undefined) {
      this.#give(piece);
      return;
    }
    this.#waiting.push(piece);
    this.#waitingBytes += piece.length;
    if (this.#waitingBytes > MOST_WAITING_BYTES) this.#controller.pause();
  }

  end(error?: Error): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#error = error;
    this.#onEnd?.();
  }

  /**
   * Gives every piece to `take`, until the end or until it answers false: then the rest is given up. A piece is the caller's until
   * `take` returns, and longer. To be called once. @throws what `take` throws, or what ended the body early
   */
  async each(take: (piece: Buffer) => boolean): Promise<void> {
    let enough = false;
    let thrown: { error: unknown } | undefined;
    const stopped = new Promise<void>((stop) => {
      this.#onEnd = stop;
      this.#take = (piece) => {
        try {
          if (take(piece)) return true;
        } catch (error) {
          thrown = { error };
        }
        enough = true;
        stop();
        return false;
      };
    });
    for (const piece of this.#waiting.splice(0)) if (!enough) this.#give(piece);
    if (this.#controller.paused) this.#controller.resume();
    if (!this.#ended) await stopped;
    if (thrown !== undefined) throw thrown.error;
    if (!enough && this.#error !== undefined) throw this.#error;
  }

  /** What is left is not wanted. Of a short rest the connection is kept. */
  giveUp(restIsShort: boolean): void {
    if (this.#ended) return;
    this.#take = () => true;
    this.#waiting = [];
    if (restIsShort) this.#controller.resume();
    else this.#controller.abort(new Error('the rest of the answer is not wanted'));
  }

  #give(piece: Buffer): void {
    this.#take!(piece);
  }
}
