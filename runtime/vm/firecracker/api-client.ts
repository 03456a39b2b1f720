/**
 * Firecracker's API: HTTP with JSON bodies over a unix socket. One request at a time, as Firecracker takes them, each on a connection of its own: what
 * it is busy with (a snapshot) may take long, and a connection that is kept would only have to be found dead.
 *
 * A guest that takes Firecracker over can answer what it wants: answers are bounded, and only what is asked for is read.
 */
import { request } from 'node:http';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';
import type { ApiRequest } from './requests.ts';

const MAX_ANSWER_BYTES = 256 * 1024;
const ANSWER_MS = 60_000;
/** Memory is written to a disk. */
const SNAPSHOT_MS = 30 * 60_000;

export class FirecrackerApi {
  private readonly socket: string;
  private readonly id: string;
  private last: Promise<unknown> = Promise.resolve();

  constructor(socket: string, id: string) {
    this.socket = socket;
    this.id = id;
  }

  /** What it answers; undefined when that is nothing. @throws VM_FIRECRACKER_API, VM_GONE */
  send(asked: ApiRequest): Promise<unknown> {
    const sent = this.last.then(() => this.sendNow(asked));
    this.last = sent.catch(() => {});
    return sent;
  }

  private sendNow({ method, path, body }: ApiRequest): Promise<unknown> {
    const text = body === undefined ? undefined : JSON.stringify(body);
    const name = `${method} ${path}`;
    const timeoutMs = path.startsWith('/snapshot/') ? SNAPSHOT_MS : ANSWER_MS;
    return new Promise((resolve, reject) => {
      const refuse = (reason: string) => reject(fail('VM_FIRECRACKER_API', { id: this.id, request: name, reason }));
      const headers: Record<string, string | number> = { accept: 'application/json' };
      if (text !== undefined) {
        headers['content-type'] = 'application/json';
        headers['content-length'] = Buffer.byteLength(text);
      }
      const call = request(
        { socketPath: this.socket, host: 'localhost', method, path, headers, agent: false, timeout: timeoutMs },
        (response) => {
          const parts: Buffer[] = [];
          let bytes = 0;
          response.on('data', (part: Buffer) => {
            bytes += part.length;
            if (bytes > MAX_ANSWER_BYTES) call.destroy(new Error(`an answer of more than ${MAX_ANSWER_BYTES} bytes`));
            else parts.push(part);
          });
          response.on('error', (error) => refuse(messageOf(error)));
          response.on('end', () => {
            const answer = Buffer.concat(parts).toString('utf8');
            const status = response.statusCode ?? 0;
            if (status < 200 || status >= 300) return refuse(faultOf(answer) ?? `status ${status}`);
            if (answer === '') return resolve(undefined);
            try {
              resolve(JSON.parse(answer));
            } catch {
              refuse('its answer is no JSON');
            }
          });
        },
      );
      call.on('timeout', () => call.destroy(new Error(`no answer within ${timeoutMs / 1000} s`)));
      call.on('error', (error: NodeJS.ErrnoException) => {
        const gone = error.code === 'ECONNREFUSED' || error.code === 'ENOENT';
        if (gone) reject(fail('VM_GONE', { id: this.id, reason: 'its API socket is not served' }, error));
        else refuse(messageOf(error));
      });
      call.end(text);
    });
  }
}

function faultOf(answer: string): string | undefined {
  try {
    const { fault_message: fault } = JSON.parse(answer) as { fault_message?: unknown };
    return typeof fault === 'string' ? fault.slice(0, 2000) : undefined;
  } catch {
    return undefined;
  }
}
