/** The runtime service's sandboxes as a client on this machine sees them (sandbox-routes.ts). Errors arrive as what they were there. */
import type { IncomingMessage, RequestOptions } from 'node:http';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { StringDecoder } from 'node:string_decoder';
import { DsecError, systemCode } from '#base';
import {
  type AllLimits,
  type ClipboardType,
  type DeniedAttempt,
  type ExecResult,
  type ExecSpec,
  type LimitChanges,
  type NetworkCounters,
  type NetworkPolicy,
  type NetworkView,
  type PauseReport,
  runtimeFolders,
  type SandboxEnd,
  type SandboxUsage,
  type ScreenAction,
  type Selection,
  type UploadSpec,
  type UploadState,
} from '#runtime';
import { fail } from '../errors.ts';
import type { PackedView } from '../pack-sandbox.ts';
import { type OutputNews, parseOutput, type RemoteError } from './output-frames.ts';
import { connectionProblem, requestTo, type ServiceAddress } from './service-address.ts';

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

/** Of a cluster, `name` is the whole id. */
export interface SandboxRow {
  readonly name: string;
  readonly id?: string;
  readonly [field: string]: unknown;
}

export interface FileRow extends StatView {
  readonly name: string;
  readonly nameBase64?: string;
}

export interface ForkView {
  readonly snapshot: { readonly name: string; readonly digest: string };
  readonly notes: readonly string[];
  readonly sandboxes: readonly SandboxRow[];
}

export interface StatView {
  readonly kind: string;
  readonly size: number;
  readonly mode: number;
  readonly modifiedMs: number;
}

export interface WatchNews {
  readonly event: string;
  readonly path?: string;
  readonly pathBase64?: string;
  readonly directory?: boolean;
  readonly cookie?: number;
}

type Query = Readonly<Record<string, string | number | boolean | undefined>>;

export interface SandboxListing {
  readonly sandboxes: readonly SandboxRow[];
  readonly unreachable: readonly string[];
  readonly continue?: string;
}

export class SandboxClient {
  private readonly address: ServiceAddress;
  /** Of a cluster: the whole ids that names without an edge have turned out to be. */
  private readonly ids = new Map<string, string>();

  /** Of this machine's runtime service, or of a cluster's API: there names are ids, NAME.EDGE. */
  constructor(address: ServiceAddress = sandboxSocket(runtimeFolders().runDir)) {
    this.address = address;
  }

  /** Whether its sandboxes are on machines whose paths mean nothing here. */
  get isRemote(): boolean {
    return typeof this.address !== 'string';
  }

  async create(body: object): Promise<SandboxRow> {
    return this.named(await this.json('POST', '/v1/sandboxes', body));
  }
  async get(name: string): Promise<SandboxRow> {
    return this.named(await this.json('GET', path(name)));
  }
  async list(query: Query = {}): Promise<SandboxRow[]> {
    return [...(await this.listing(query)).sandboxes];
  }
  /** `unreachable`: edges of a cluster that did not answer. All there are, or with `limit` a page; `continue` is for the next one. */
  async listing(query: Query = {}): Promise<SandboxListing> {
    const sandboxes: SandboxRow[] = [];
    const unreachable = new Set<string>();
    for (let from = query.continue; ; ) {
      const answer = await this.json<SandboxRow[] | SandboxListing>(
        'GET',
        `/v1/sandboxes${queryOf({ ...query, continue: from })}`,
      );
      if (Array.isArray(answer)) return { sandboxes: answer, unreachable: [] };
      for (const row of answer.sandboxes) sandboxes.push(this.named(row));
      for (const edge of answer.unreachable) unreachable.add(edge);
      from = answer.continue;
      if (from === undefined || query.limit !== undefined)
        return { sandboxes, unreachable: [...unreachable], continue: from };
    }
  }
  update(name: string, changes: LimitChanges): Promise<AllLimits> {
    return this.json('PUT', `${path(name)}/limits`, changes);
  }
  usage(name: string, countDisk: boolean): Promise<SandboxUsage> {
    return this.json('GET', `${path(name)}/usage${queryOf({ disk: countDisk })}`);
  }
  network(name: string): Promise<NetworkView> {
    return this.json('GET', `${path(name)}/network`);
  }
  setNetwork(name: string, policy: NetworkPolicy): Promise<NetworkView> {
    return this.json('PUT', `${path(name)}/network`, { policy });
  }
  networkCounters(name: string): Promise<NetworkCounters> {
    return this.json('GET', `${path(name)}/network/counters`);
  }
  networkDenied(name: string, limit: number): Promise<DeniedAttempt[]> {
    return this.json('GET', `${path(name)}/network/denied${queryOf({ limit })}`);
  }
  stop(name: string, timeMs: number): Promise<SandboxEnd> {
    return this.json('POST', `${path(name)}/stop`, { timeMs });
  }
  pause(name: string): Promise<PauseReport> {
    return this.json('POST', `${path(name)}/pause`);
  }
  async resume(name: string): Promise<void> {
    await this.json('POST', `${path(name)}/resume`);
  }
  packDiff(name: string, body: object, signal?: AbortSignal): Promise<PackedView> {
    return this.json('POST', `${path(name)}/pack-diff`, body, signal);
  }
  async fork(name: string, body: object): Promise<ForkView> {
    const forked = await this.json<ForkView>('POST', `${path(name)}/fork`, body);
    return { ...forked, sandboxes: forked.sandboxes.map((row) => this.named(row)) };
  }
  /** `force`: also one that runs. */
  async remove(name: string, force: boolean): Promise<void> {
    await this.json('DELETE', `${path(name)}${queryOf({ force })}`);
  }
  exec(name: string, spec: ExecSpec): Promise<CommandView> {
    return this.json('POST', `${path(name)}/commands`, spec);
  }
  commands(name: string): Promise<CommandView[]> {
    return this.json('GET', `${path(name)}/commands`);
  }
  async *output(name: string, id: number, from: Query = {}, signal?: AbortSignal): AsyncGenerator<OutputNews> {
    const answer = await this.send('GET', `${path(name)}/commands/${id}/output${queryOf(from)}`, { signal });
    yield* parseOutput(bodyOf(answer));
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
  /** Events as docs/sandboxes.md has them; the first is `watching`. */
  async *watch(name: string, query: Query, signal?: AbortSignal): AsyncGenerator<WatchNews> {
    const answer = await this.send('GET', `${path(name)}/files/watch${queryOf(query)}`, { signal });
    const decoder = new StringDecoder('utf8');
    let rest = '';
    for await (const bytes of bodyOf(answer)) {
      const lines = (rest + decoder.write(bytes)).split('\n');
      rest = lines.pop()!;
      for (const line of lines) {
        if (line === '') continue;
        const news = JSON.parse(line) as WatchNews & { readonly error?: RemoteError };
        if (news.error !== undefined) throwRemote(news.error);
        yield news;
      }
    }
  }
  async copy(name: string, direction: 'upload' | 'download', from: string, to: string): Promise<void> {
    await this.json('POST', `${path(name)}/files/${direction}`, { from, to });
  }
  stat(name: string, of: string): Promise<StatView> {
    return this.json('GET', `${path(name)}/files/stat${queryOf({ path: of })}`);
  }
  files(name: string, folder: string): Promise<FileRow[]> {
    return this.json('GET', `${path(name)}/files/list${queryOf({ path: folder })}`);
  }
  async mkdir(name: string, folder: string, mode?: number): Promise<void> {
    await this.json('POST', `${path(name)}/files/mkdir${queryOf({ path: folder, recursive: true, mode })}`);
  }
  async link(name: string, of: string): Promise<string> {
    return (await this.json<{ target: string }>('GET', `${path(name)}/files/link${queryOf({ path: of })}`)).target;
  }
  async symlink(name: string, target: string, at: string): Promise<void> {
    await this.json('POST', `${path(name)}/files/symlink`, { from: target, to: at });
  }
  async removeFile(name: string, of: string): Promise<void> {
    await this.json('DELETE', `${path(name)}/files${queryOf({ path: of })}`);
  }
  /** For whatever has no method here. */
  ask<T>(method: string, url: string, body?: object): Promise<T> {
    return this.json(method, url, body);
  }
  digest(name: string, of: string): Promise<{ readonly sha256: string }> {
    return this.json('GET', `${path(name)}/files/digest${queryOf({ path: of })}`);
  }
  /** As PNG. */
  async screenshot(name: string): Promise<Buffer> {
    return drain(await this.send('GET', `${path(name)}/screen`));
  }
  async act(name: string, actions: readonly ScreenAction[]): Promise<void> {
    await this.json('POST', `${path(name)}/screen/input`, { actions });
  }
  /** Undefined: nothing of this type is there. */
  async clipboard(name: string, type: ClipboardType, selection: Selection): Promise<Buffer | undefined> {
    const answer = await this.send('GET', `${path(name)}/screen/clipboard${queryOf({ type, selection })}`);
    const bytes = await drain(answer);
    return answer.statusCode === 204 ? undefined : bytes;
  }
  async setClipboard(name: string, type: ClipboardType, selection: Selection, bytes: Buffer): Promise<void> {
    const headers = { 'content-type': 'application/octet-stream' };
    const url = `${path(name)}/screen/clipboard${queryOf({ type, selection })}`;
    await drain(await this.send('PUT', url, { headers, body: Readable.from([bytes]) }));
  }
  async *console(name: string, follow: boolean, signal?: AbortSignal): AsyncGenerator<Buffer> {
    yield* bodyOf(await this.send('GET', `${path(name)}/console${queryOf({ follow })}`, { signal }));
  }
  async writeConsole(name: string, input: Readable): Promise<void> {
    const headers = { 'content-type': 'application/octet-stream', 'transfer-encoding': 'chunked' };
    await drain(await this.send('POST', `${path(name)}/console`, { headers, body: input }));
  }
  async *content(name: string, of: string, offset: number): AsyncGenerator<Buffer> {
    const answer = await this.send('GET', `${path(name)}/files${queryOf({ path: of, offset })}`);
    yield* bodyOf(answer);
  }
  /** The file is whole, or as it was; of a whole machine it is written in place. */
  async write(name: string, to: string, body: Readable): Promise<void> {
    const headers = { 'content-type': 'application/octet-stream', 'transfer-encoding': 'chunked' };
    try {
      await drain(await this.send('PUT', `${path(name)}/files${queryOf({ path: to })}`, { headers, body }));
    } finally {
      body.destroy();
    }
  }
  uploadState(name: string, { path: to, ...rest }: UploadSpec): Promise<UploadState> {
    return this.json('GET', `${path(name)}/files/parts${queryOf({ path: String(to), ...rest })}`);
  }
  async uploadPart(name: string, spec: UploadSpec, offset: number, body: Readable): Promise<UploadState> {
    const { path: to, ...rest } = spec;
    const query = queryOf({ path: String(to), ...rest, offset });
    const headers = { 'content-type': 'application/octet-stream', 'transfer-encoding': 'chunked' };
    try {
      const answer = await this.send('PUT', `${path(name)}/files/parts${query}`, { headers, body });
      return JSON.parse((await drain(answer)).toString()) as UploadState;
    } finally {
      body.destroy();
    }
  }

  private named<T extends { readonly name: string; readonly id?: string }>(row: T): T {
    return this.isRemote && row.id !== undefined ? { ...row, name: row.id } : row;
  }

  private async json<T>(method: string, url: string, body?: object, signal?: AbortSignal): Promise<T> {
    const headers = body === undefined ? {} : { 'content-type': 'application/json' };
    const text = body === undefined ? undefined : JSON.stringify(body);
    const answer = await this.send(method, url, { headers, body: text, signal });
    return JSON.parse((await drain(answer)).toString()) as T;
  }

  /**
   * In a cluster a name without its edge does where one sandbox alone is called so: its whole id. A name that is whole, that nobody has, or of this
   * machine, is the answer as it is.
   *
   * @param ended Those that have ended count too: `also`, or `else` only where none runs that is called so.
   * @throws SANDBOX_AMBIGUOUS; SANDBOX_NAME_UNSURE where edges did not answer, which may have another one
   */
  async wholeId(name: string, ended?: 'also' | 'else'): Promise<string> {
    if (!this.isRemote || name.includes('.')) return name;
    const known = this.ids.get(name);
    if (known !== undefined) return known;
    const ids = new Set(await this.called(name));
    if (ended === 'also' || (ended === 'else' && ids.size === 0)) {
      for (const id of await this.called(name, 'ended')) ids.add(id);
    }
    if (ids.size > 1) throw fail('SANDBOX_AMBIGUOUS', { name, ids: [...ids].join(', ') });
    // Where there is none, the API says so.
    const [id = name] = ids;
    if (id !== name) this.ids.set(name, id);
    return id;
  }

  /** The ids of those that are called so, in `state`, or else of all that have not ended. @throws SANDBOX_NAME_UNSURE */
  private async called(name: string, state?: 'ended'): Promise<string[]> {
    const { sandboxes, unreachable } = await this.listing({ name, state });
    if (unreachable.length > 0) throw fail('SANDBOX_NAME_UNSURE', { name, edges: unreachable.join(', ') });
    return sandboxes.map((row) => row.name).filter((id) => id.slice(0, id.lastIndexOf('.')) === name);
  }

  private async withWholeId(url: string): Promise<string> {
    const [start = '', name] = /^\/v1\/sandboxes\/([^/?.]+)(?=[/?]|$)/.exec(url) ?? [];
    if (!this.isRemote || name === undefined) return url;
    return `${path(await this.wholeId(decodeURIComponent(name)))}${url.slice(start.length)}`;
  }

  private async send(
    method: string,
    asked: string,
    { body, ...options }: RequestOptions & { readonly body?: Readable | string } = {},
  ): Promise<IncomingMessage> {
    const url = await this.withWholeId(asked);
    const exchange = (resolve: (answer: IncomingMessage) => void, reject: (error: Error) => void) => {
      const again = () => exchange(resolve, reject);
      const sent = requestTo(this.address, { method, path: url, ...options });
      let isAnswered = false;
      let unread: Error | undefined;
      sent.once('response', (answer) => {
        isAnswered = true;
        resolve(answer);
      });
      sent.on('error', (error) => {
        // Whoever reads the answer hears of it there.
        if (isAnswered) return;
        // What is sent could not be read: no fault of the connection.
        if (unread !== undefined) return reject(unread);
        // The service may have closed a connection that was kept and idle; or it died while it worked on this: what would be done twice is not asked twice.
        const isCut = sent.reusedSocket && CUT.includes(systemCode(error) ?? '');
        if (isCut && isRepeatable(method, body)) again();
        else reject(connectionProblem(this.address, error));
      });
      if (body === undefined || typeof body === 'string') sent.end(body);
      else {
        // An answer may come before all of it was sent: the command has ended.
        body.pipe(sent);
        body.once('error', (error) => {
          unread = error;
          sent.destroy(error);
        });
        sent.once('response', () => body.unpipe(sent));
        sent.once('close', () => body.unpipe(sent));
      }
    };
    const answer = await new Promise<IncomingMessage>(exchange);
    if ((answer.statusCode ?? 500) < 300) return answer;
    throw thrownThere((await drain(answer)).toString());
  }
}

const CUT: readonly string[] = ['EPIPE', 'ECONNRESET'];

/** Asked again, it does nothing more. */
function isRepeatable(method: string, body: Readable | string | undefined): boolean {
  if (body !== undefined && typeof body !== 'string') return false;
  return method !== 'POST' || /"requestId":"/.test(body ?? '');
}

/** @throws it */
export function throwRemote({ code, message, hint, exit }: RemoteError): never {
  throw new DsecError(code, { message, hint, exit: exit ?? 1, http: 500 });
}

export function thrownThere(text: string): Error {
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

/** @throws SANDBOX_PROTOCOL when it ends in the middle */
async function* bodyOf(answer: IncomingMessage): AsyncGenerator<Buffer> {
  try {
    for await (const bytes of answer) yield bytes as Buffer;
  } catch (error) {
    // Who gave it up knows why.
    if (systemCode(error) !== 'ECONNRESET') throw error;
    throw fail('SANDBOX_PROTOCOL', { problem: 'it ended in the middle of an answer' }, error);
  }
}

async function drain(answer: IncomingMessage): Promise<Buffer> {
  const parts: Buffer[] = [];
  for await (const bytes of bodyOf(answer)) parts.push(bytes);
  return Buffer.concat(parts);
}
