/**
 * The edges as this instance knows them: the watcher's cluster, asked every second, and a client for each. What is known stays when the watcher
 * is away: sandboxes are reached still, and new ones are placed by the last reports, until those are too old to be believed.
 */
import { DsecError, isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import { ClusterView } from '../placement/cluster-view.ts';
import type { NodeReport } from '../placement/node-report.ts';
import { type NodeReportJson, reportFromJson } from '../placement/report-json.ts';
import type { ClusterToken } from '../service-base/cluster-token.ts';
import { PeerClient, type PeerRequest } from '../service-base/peer-client.ts';
import type { ClientTlsFiles } from '../service-base/tls-files.ts';

/** A row of the watcher's GET /v1/cluster. */
export interface ClusterNode {
  readonly edge: string;
  readonly url: string;
  readonly labels?: readonly string[];
  readonly report?: NodeReportJson;
  readonly heardMsAgo?: number;
  readonly alive: boolean;
}

interface ClusterAnswer {
  readonly epoch: string;
  /** Since its start: one that has just come may not have heard of all edges yet. */
  readonly upMs?: number;
  readonly atMs: number;
  readonly nodes: readonly ClusterNode[];
}

export interface EdgesOptions {
  readonly watcherUrl: string;
  readonly token: ClusterToken | undefined;
  readonly tls?: ClientTlsFiles;
  readonly note: (problem: string) => void;
  readonly pollMs?: number;
  /** Connections to each edge: 64 by default. */
  readonly connections?: number;
}

export type NodeChange = (edge: string, what: 'up' | 'down' | 'draining' | 'gone') => void;

export const AWAY = 'the watcher says that it is away';
const POLL_MS = 1000;
/** Edges make themselves known to a new watcher in less. */
const SETTLED_MS = 15_000;
/** Older reports than this place nothing any more. */
const STALE_MS = 60_000;

export class Edges {
  readonly view = new ClusterView({ now: Date.now });
  private readonly options: EdgesOptions;
  private readonly watcher: PeerClient;
  private readonly clients = new Map<string, PeerClient>();
  private rows: ReadonlyMap<string, ClusterNode> = new Map();
  private readonly states = new Map<string, string>();
  private readonly asking = new Map<string, Set<AbortController>>();
  private heardAt = 0;
  private settling = true;
  private timer: NodeJS.Timeout | undefined;
  private closed = false;
  private problem: string | undefined = 'the watcher was not asked yet';
  onChange: NodeChange = () => {};

  /** @throws SERVICE_URL, SERVICE_TLS_FILE */
  constructor(options: EdgesOptions) {
    this.options = options;
    const { watcherUrl: url, token, tls } = options;
    this.watcher = new PeerClient({ url, token, tls, connections: 2 });
  }

  /** The first answer of the watcher, or its absence, is in when this resolves. */
  async start(): Promise<void> {
    await this.poll();
  }

  get nodes(): readonly ClusterNode[] {
    return [...this.rows.values()];
  }

  get notReady(): string | undefined {
    return this.heardAt === 0 ? this.problem : undefined;
  }

  get heardMsAgo(): number | undefined {
    return this.heardAt === 0 ? undefined : Date.now() - this.heardAt;
  }

  /** The watcher has just started: there may be edges that are not known yet. */
  get isSettling(): boolean {
    return this.settling;
  }

  isAlive(edge: string): boolean {
    return this.rows.get(edge)?.alive ?? false;
  }

  /** @throws EDGE_UNKNOWN, EDGE_UNREACHABLE where it may be known soon */
  client(edge: string): PeerClient {
    const client = this.clients.get(edge);
    if (client !== undefined) return client;
    if (this.settling)
      throw fail('EDGE_UNREACHABLE', { edge, reason: 'the watcher has not heard of it since it started' });
    throw fail('EDGE_UNKNOWN', { edge });
  }

  /** @throws EDGE_UNKNOWN */
  urlOf(edge: string): string {
    return this.client(edge).url;
  }

  /** What an edge answers, as JSON. @throws EDGE_UNREACHABLE, EDGE_UNKNOWN, what was thrown there */
  async ask<T>(edge: string, request: PeerRequest): Promise<T> {
    const lost = new AbortController();
    const asking = this.asking.get(edge) ?? new Set();
    this.asking.set(edge, asking.add(lost));
    const signal = request.signal === undefined ? lost.signal : AbortSignal.any([request.signal, lost.signal]);
    try {
      return await this.client(edge).json<T>({ ...request, signal });
    } catch (error) {
      throw unreachable(edge, error);
    } finally {
      asking.delete(lost);
      if (asking.size === 0 && this.asking.get(edge) === asking) this.asking.delete(edge);
    }
  }

  /** Who waits for the answer of an edge that is away would wait until a connection notices. */
  private lost(edge: string): void {
    const reason = fail('EDGE_UNREACHABLE', { edge, reason: AWAY });
    for (const asking of this.asking.get(edge) ?? []) asking.abort(reason);
  }

  async close(): Promise<void> {
    this.closed = true;
    clearTimeout(this.timer);
    await Promise.all([this.watcher, ...this.clients.values()].map((client) => client.close()));
  }

  async poll(): Promise<void> {
    clearTimeout(this.timer);
    try {
      const answer = await this.watcher.json<ClusterAnswer>({ method: 'GET', path: '/v1/cluster', timeoutMs: 5000 });
      this.settling = answer.upMs !== undefined && answer.upMs < SETTLED_MS;
      this.take(answer.nodes);
      this.heardAt = Date.now();
      if (this.problem !== undefined && this.heardAt !== 0) this.problem = undefined;
    } catch (error) {
      const problem = `the watcher: ${messageOf(error)}`;
      if (!this.closed && problem !== this.problem) this.options.note(problem);
      this.problem = problem;
      if (this.heardAt !== 0 && Date.now() - this.heardAt > STALE_MS) this.distrust();
    }
    if (this.closed) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => void this.poll(), this.options.pollMs ?? POLL_MS);
    this.timer.unref();
  }

  private take(nodes: readonly ClusterNode[]): void {
    const rows = new Map<string, ClusterNode>();
    for (const node of nodes) {
      rows.set(node.edge, node);
      const known = this.clients.get(node.edge);
      if (known?.url !== node.url) this.connect(node);
      const report = this.reportOf(node);
      if (report !== undefined) this.view.update(report);
      this.told(node.edge, report === undefined || report.state === 'dead' ? 'down' : stateOf(report));
    }
    for (const edge of this.clients.keys()) {
      if (rows.has(edge)) continue;
      const before = this.rows.get(edge);
      if (this.settling && before !== undefined) {
        // It stays, as while the watcher is away.
        rows.set(edge, before);
        continue;
      }
      void this.clients.get(edge)?.close();
      this.clients.delete(edge);
      this.view.forget(edge);
      this.states.delete(edge);
      this.onChange(edge, 'gone');
    }
    this.rows = rows;
  }

  private connect({ edge, url }: ClusterNode): void {
    const { token, tls, connections = 64 } = this.options;
    void this.clients.get(edge)?.close();
    this.clients.delete(edge);
    try {
      this.clients.set(edge, new PeerClient({ url, token, tls, connections }));
    } catch (error) {
      this.options.note(`edge ${edge}: ${messageOf(error)}`);
    }
  }

  private reportOf({ edge, report, alive }: ClusterNode): NodeReport | undefined {
    if (report === undefined) return undefined;
    try {
      const read = reportFromJson(report);
      if (read.edge !== edge) throw fail('SERVICE_REPORT', { problem: `edge ${edge} calls itself ${read.edge}` });
      return alive ? read : { ...read, state: 'dead' };
    } catch (error) {
      this.options.note(`edge ${edge}: ${messageOf(error)}`);
      return undefined;
    }
  }

  private told(edge: string, now: 'up' | 'down' | 'draining'): void {
    const before = this.states.get(edge);
    this.states.set(edge, now);
    if (before === now || (before === undefined && this.heardAt === 0)) return;
    if (now === 'down') this.lost(edge);
    this.onChange(edge, now);
  }

  private distrust(): void {
    for (const { report } of this.view.nodes) {
      if (report.state !== 'dead') this.view.update({ ...report, state: 'dead' });
    }
  }
}

function stateOf(report: NodeReport): 'up' | 'draining' {
  return report.state === 'draining' ? 'draining' : 'up';
}

/** Errors of the connection say which edge it is; all others are what they were. */
export function unreachable(edge: string, error: unknown): unknown {
  if (!isDsecError(error)) return error;
  if (error.code === 'SERVICE_TOKEN') return fail('EDGE_UNREACHABLE', { edge, reason: error.message }, error);
  if (!['SERVICE_UNREACHABLE', 'SERVICE_LOST', 'SERVICE_ANSWER'].includes(error.code)) return error;
  return fail('EDGE_UNREACHABLE', { edge, reason: String(error.params.reason ?? error.message) }, error);
}

export const NOT_THERE = 'its edge has none of this name';

/** Of a sandbox that is not there, or not any more: one code, whichever way it is known. */
export function gone(id: string, error: unknown): unknown {
  if (!isDsecError(error)) return error;
  if (error.code === 'RUNTIME_SANDBOX_GONE') {
    const reason = /has ended: (.*)$/s.exec(error.message)?.[1] ?? 'it has ended';
    return fail('SANDBOX_GONE', { id, reason, ended: error.params.ended }, error);
  }
  if (error.code === 'RUNTIME_SANDBOX_NOT_FOUND') {
    return fail('SANDBOX_GONE', { id, reason: NOT_THERE }, error);
  }
  return error;
}

export function isUnknownOutcome(error: unknown): boolean {
  return isDsecError(error, 'SERVICE_LOST') || isDsecError(error, 'SERVICE_ANSWER') || !(error instanceof DsecError);
}
