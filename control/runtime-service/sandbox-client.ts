/** The runtime service's sandboxes as a client on this machine sees them (sandbox-routes.ts). Errors arrive as what they were there. */
import { type IncomingMessage, type RequestOptions, request } from 'node:http';
import { join } from 'node:path';
import type { Readable } from 'node:stream';
import { DsecError, messageOf, systemCode } from '#base';
import { type ExecResult, type ExecSpec, runtimeFolders, type SandboxEnd } from '#runtime';
import { fail } from '../errors.ts';
import { type OutputNews, parseOutput, type RemoteError } from './output-frames.ts';

export function sandboxSocket(runDir: string): string {
  return join(runDir, 'sandboxes.sock');
}

export interface CommandView {
  readonly id: number;
  readonly args?: readonly string[];
  readonly startedMs?: number;
  readonly running: boolean;
  readonly result?: ExecResult;
}

type Query = Readonly<Record<string, string | number | boolean | undefined>>;

export class SandboxClient {
  private readonly socket: string;

  constructor(socket: string = sandboxSocket(runtimeFolders().runDir)) {
    this.socket = socket;
  }

  create(body: object): Promise<{ readonly name: string } & Readonly<Record<string, unknown>>> {
    return this.json('POST', '/v1/sandboxes', body);
  }
  stop(name: string, timeMs: number): Promise<SandboxEnd> {
    return this.json('POST', `${path(name)}/stop`, { timeMs });
  }
  exec(name: string, spec: ExecSpec): Promise<CommandView> {
    return this.json('POST', `${path(name)}/commands`, spec);
  }
  commands(name: string): Promise<CommandView[]> {
    return this.json('GET', `${path(name)}/commands`);
  }
  async *output(name: string, id: number, from: Query = {}, signal?: AbortSignal): AsyncGenerator<OutputNews> {
    const answer = await this.send('GET', `${path(name)}/commands/${id}/output${queryOf(from)}`, { signal });
    yield* parseOutput(answer);
  }
  /** Until `input` ends; then the command finds its input at its end. */
  async input(name: string, id: number, input: Readable): Promise<void> {
    const headers = { 'content-type': 'application/octet-stream', 'transfer-encoding': 'chunked' };
    await drain(await this.send('POST', `${path(name)}/commands/${id}/stdin`, { headers, body: input }));
  }
  async signal(name: string, id: number, signal: NodeJS.Signals): Promise<void> {
    await this.json('POST', `${path(name)}/commands/${id}/signal`, { signal });
  }
  async resize(name: string, id: number, size: { readonly rows: number; readonly columns: number }): Promise<void> {
    await this.json('POST', `${path(name)}/commands/${id}/resize`, size);
  }
  async copy(name: string, direction: 'upload' | 'download', from: string, to: string): Promise<void> {
    await this.json('POST', `${path(name)}/files/${direction}`, { from, to });
  }
  stat(name: string, of: string): Promise<{ readonly kind: string }> {
    return this.json('GET', `${path(name)}/files/stat${queryOf({ path: of })}`);
  }

  private async json<T>(method: string, url: string, body?: object): Promise<T> {
    const headers = body === undefined ? {} : { 'content-type': 'application/json' };
    const text = body === undefined ? undefined : JSON.stringify(body);
    const answer = await this.send(method, url, { headers, body: text });
    return JSON.parse((await drain(answer)).toString()) as T;
  }

  private async send(
    method: string,
    url: string,
    { body, ...options }: RequestOptions & { readonly body?: Readable | string } = {},
  ): Promise<IncomingMessage> {
    const answer = await new Promise<IncomingMessage>((resolve, reject) => {
      const sent = request({ socketPath: this.socket, method, path: url, ...options }, resolve);
      sent.once('error', (error) => {
        const away = ['ENOENT', 'ECONNREFUSED'].includes(systemCode(error) ?? '');
        reject(
          away
            ? fail('SANDBOX_NO_SERVICE', { socket: this.socket })
            : fail('SANDBOX_PROTOCOL', { problem: messageOf(error) }, error),
        );
      });
      if (body === undefined || typeof body === 'string') sent.end(body);
      else {
        // An answer may come before all of it was sent: the command has ended.
        body.pipe(sent);
        sent.once('response', () => body.unpipe(sent));
        sent.once('close', () => body.unpipe(sent));
      }
    });
    if ((answer.statusCode ?? 500) < 300) return answer;
    throw thrownThere((await drain(answer)).toString());
  }
}

/** @throws it */
export function throwRemote({ code, message, hint, exit }: RemoteError): never {
  throw new DsecError(code, { message, hint, exit: exit ?? 1, http: 500 });
}

function thrownThere(text: string): Error {
  try {
    const { code, message, hint, exit, retryable } = (
      JSON.parse(text) as { error: RemoteError & { retryable?: boolean } }
    ).error;
    return new DsecError(code, { message, hint, retryable, exit: exit ?? 1, http: 500 });
  } catch (error) {
    return fail('SANDBOX_PROTOCOL', { problem: 'an answer that is no JSON' }, error);
  }
}

function path(name: string): string {
  return `/v1/sandboxes/${encodeURIComponent(name)}`;
}

function queryOf(query: Query): string {
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined);
  return pairs.length === 0
    ? ''
    : `?${pairs.map(([key, value]) => `${key}=${encodeURIComponent(String(value))}`).join('&')}`;
}

async function drain(answer: IncomingMessage): Promise<Buffer> {
  const parts: Buffer[] = [];
  for await (const bytes of answer) parts.push(bytes as Buffer);
  return Buffer.concat(parts);
}
