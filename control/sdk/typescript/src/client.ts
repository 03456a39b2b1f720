/** The API of a DSec cluster, as one caller: makes sandboxes, finds them, and whatever else it has (`request`). */
import { randomUUID } from 'node:crypto';
import { type EndpointOptions, findEndpoint } from './context.ts';
import {
  connectionLost,
  type DSecError,
  type ErrorFacts,
  errorFrom,
  InvalidRequest,
  UnsupportedError,
} from './errors.ts';
import { type DSecFnCallRunArgs, FnCall, type FnCallResult, taskOf } from './fncall.ts';
import {
  type Backend,
  createBody,
  type DSecContainerRunArgs,
  type DSecMicroVMRunArgs,
  type DSecRunArgs,
  type DSecVMRunArgs,
} from './run-args.ts';
import { Sandbox } from './sandbox.ts';
import type { SandboxView } from './sandbox-views.ts';
import { BackOff, bodyOf, type CallOptions, parsed, type Query, Transport, undoable } from './transport.ts';

export interface ClientOptions extends EndpointOptions {
  /** How long no answer, or a refusal that may pass, is borne before a call without a time-out fails; 60 s. */
  readonly patienceMs?: number;
  /** Of commands that have none of their own, in the sandbox; not of background ones. None by default. */
  readonly commandTimeoutMs?: number;
}

export interface ListOptions extends CallOptions {
  readonly project?: string;
  readonly job?: string;
  readonly user?: string;
  readonly state?: 'running' | 'paused' | 'ended';
  /** One page of so many; without it, all there are. */
  readonly limit?: number;
  /** Of the page before. */
  readonly continueFrom?: string;
}

export interface SandboxList {
  readonly sandboxes: Sandbox[];
  /** Edges that did not answer: what is on them is not in the list. */
  readonly unreachable: readonly string[];
  /** For the next page, where there is one. */
  readonly continueFrom?: string;
}

interface SandboxPage {
  readonly sandboxes: readonly SandboxView[];
  readonly unreachable?: readonly string[];
  readonly continue?: string;
}

export type BatchItem =
  | { readonly index: number; readonly sandbox: Sandbox; readonly error?: undefined }
  | { readonly index: number; readonly sandbox?: undefined; readonly error: DSecError };

const PATIENCE_MS = 60_000;

export class DSecClient implements AsyncDisposable {
  private readonly options: ClientOptions;
  private opened: Transport | undefined;

  /** Without a URL: $DSEC_API, else the current context. */
  constructor(options: ClientOptions | string = {}) {
    this.options = typeof options === 'string' ? { url: options } : options;
  }

  /** Finds out where the API is; every call does so where it was not done. @throws ConfigurationError */
  async open(): Promise<this> {
    this.transport;
    return this;
  }

  close(): void {
    this.opened?.close();
    this.opened = undefined;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  get url(): string {
    return this.transport.url;
  }
  /** What a request of another program to a sandbox's port needs. */
  get headers(): Readonly<Record<string, string>> {
    return this.transport.headers;
  }

  /**
   * The same call whatever it is to live in: only the backend's name differs. `image` is a container image, of `vm` a disk.
   * @throws UnsupportedError for what a backend has not (docs/backends.md): of `fncall` there are no sandboxes; as the ones below
   */
  async run(
    backend: Backend,
    args: DSecRunArgs & { readonly image: string },
    options: CallOptions = {},
  ): Promise<Sandbox> {
    return this.create(backend, args, options);
  }

  /**
   * Resolves when the sandbox is ready for its first command. Given up meanwhile, it is removed.
   * @param options.timeoutMs Until then it waits for room, too.
   * @throws QuotaExceeded, NoCapacity, RateLimited, PermissionDenied, DSecTimeoutError
   */
  async runContainer(args: DSecContainerRunArgs, options: CallOptions = {}): Promise<Sandbox> {
    return this.create('container', args, options);
  }
  /** A short task, without a sandbox of one's own: `fncall.run` in the words of the others. @throws as that does */
  async runFncall(args: DSecFnCallRunArgs, options: CallOptions = {}): Promise<FnCallResult> {
    return this.fncall.run(taskOf(args), options);
  }
  /** @throws UnsupportedError where the cluster has no such backend; as the one below */
  async runMicrovm(args: DSecMicroVMRunArgs, options: CallOptions = {}): Promise<Sandbox> {
    return this.create('microvm', args, options);
  }
  async runVm(args: DSecVMRunArgs, options: CallOptions = {}): Promise<Sandbox> {
    return this.create('vm', args, options);
  }

  /** Short tasks. */
  get fncall(): FnCall {
    return new FnCall(this.transport);
  }

  /** Many at once, each told as it becomes ready or fails, with its index. What was told and is not wanted is the caller's to stop. */
  async *runContainers(
    args: DSecContainerRunArgs | readonly DSecContainerRunArgs[],
    { count = 1, signal }: { readonly count?: number; readonly signal?: AbortSignal } = {},
  ): AsyncGenerator<BatchItem> {
    const all: readonly DSecContainerRunArgs[] = isList(args) ? args : Array.from({ length: count }, () => args);
    // Each has its own, so that asked again for all of them no one is made twice.
    const mark = randomUUID();
    const requests = all.map((one, index) => {
      const requestId = one.requestId === undefined || isList(args) ? one.requestId : `${one.requestId}-${index}`;
      return createBody('container', { ...one, requestId }, `${mark}-${index}`);
    });
    if (requests.length === 0) return;
    const told = new Set<number>();
    const backOff = new BackOff(this.transport.patienceMs);
    while (told.size < requests.length) {
      // Of those that are left, in their order.
      const left = requests.map((_, index) => index).filter((index) => !told.has(index));
      try {
        const body = { requests: left.map((index) => requests[index]!) };
        const answer = await this.transport.once('POST', '/v1/sandboxes/batch', { body, signal });
        for await (const line of linesOf(bodyOf(answer, signal))) {
          const item = parsed<{ index: number; sandbox?: SandboxView; error?: ErrorFacts }>(line);
          const index = left[item.index];
          if (index === undefined || told.has(index)) continue;
          backOff.progress();
          told.add(index);
          if (item.sandbox !== undefined) yield { index, sandbox: this.sandboxOf(item.sandbox) };
          else yield { index, error: errorFrom(item.error ?? { code: 'PROTOCOL', message: line }) };
        }
        if (told.size < requests.length) throw connectionLost('a batch that ends before all were told');
      } catch (error) {
        await backOff.after(error, signal);
      }
    }
  }

  /** One that is there. @throws SandboxGone */
  async getSandbox(id: string, options: CallOptions = {}): Promise<Sandbox> {
    const sandbox = this.attach(id);
    await sandbox.view(options);
    return sandbox;
  }

  /** One by its id; nothing is asked. */
  attach(id: string): Sandbox {
    return new Sandbox(this.transport, id, undefined, this.options.commandTimeoutMs);
  }

  /** By edge and name: all of them, or with `limit` a page. */
  async listSandboxes({ signal, timeoutMs, continueFrom, ...query }: ListOptions = {}): Promise<SandboxList> {
    const sandboxes: Sandbox[] = [];
    const unreachable = new Set<string>();
    let from = continueFrom;
    do {
      const page = await this.transport.json<SandboxPage>('GET', '/v1/sandboxes', {
        signal,
        timeoutMs,
        query: { ...query, continue: from },
      });
      for (const view of page.sandboxes) sandboxes.push(this.sandboxOf(view));
      for (const edge of page.unreachable ?? []) unreachable.add(edge);
      from = page.continue;
    } while (from !== undefined && query.limit === undefined);
    return { sandboxes, unreachable: [...unreachable], continueFrom: from };
  }

  /** Anything else of the API (docs/api-reference.md): its JSON. */
  async request<T = unknown>(
    method: string,
    path: string,
    options: CallOptions & { readonly query?: Query; readonly body?: object } = {},
  ): Promise<T> {
    return this.transport.json<T>(method, path, options);
  }

  private get transport(): Transport {
    this.opened ??= new Transport(findEndpoint(this.options), { patienceMs: this.options.patienceMs ?? PATIENCE_MS });
    return this.opened;
  }

  private async create(
    backend: Backend,
    args: DSecContainerRunArgs | DSecMicroVMRunArgs,
    options: CallOptions,
  ): Promise<Sandbox> {
    const body = createBody(backend, args, randomUUID());
    const { transport } = this;
    const deadline = options.timeoutMs === undefined ? undefined : Date.now() + options.timeoutMs;
    const begin = async (stop: AbortSignal | undefined) =>
      this.sandboxOf(await transport.begin<SandboxView>('/v1/sandboxes', body, { stop, deadline }));
    try {
      return await undoable(options, begin, (sandbox) => sandbox.remove({ force: true }));
    } catch (error) {
      const unknown = error instanceof InvalidRequest && backend !== 'container' && error.message.includes('backend');
      if (!(error instanceof UnsupportedError) && !unknown) throw error;
      const { code, message, hint, requestId, status } = error;
      throw new UnsupportedError({ code, message, hint, requestId, status, backend, cause: error });
    }
  }

  private sandboxOf(view: SandboxView): Sandbox {
    return new Sandbox(this.transport, view.id, view, this.options.commandTimeoutMs);
  }
}

async function* linesOf(stream: AsyncIterable<Buffer>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  let rest = '';
  for await (const bytes of stream) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split('\n');
    rest = lines.pop()!;
    for (const line of lines) if (line.trim() !== '') yield line;
  }
  if (rest.trim() !== '') yield rest;
}

function isList<T>(value: T | readonly T[]): value is readonly T[] {
  return Array.isArray(value);
}
