/**
 * The sandboxes that stay on this machine: creates them, finds them again after a restart, and knows each by its name. One process a
 * machine (the runtime service); the keeper and the records are what outlives it.
 */
import { existsSync, mkdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { failPoint, messageOf } from '#base';
import { KeeperChannel, type Kept } from '../aether/keeper-channel.ts';
import type { SpoolLimits } from '../aether/output-spool.ts';
import type { AgentBinary } from '../backend/agent-binary.ts';
import { backendNamed, RUNTIME_NAMES } from '../backend/choose-backend.ts';
import { findOciRuntime } from '../backend/oci-runtime.ts';
import { OWN_BACKEND } from '../backend/own-backend.ts';
import { fail } from '../errors.ts';
import { NodeNetwork, type NodeNetworkOptions } from '../network/node-network.ts';
import { DENY_ALL } from '../network/policy.ts';
import { dismantle, removeFolder } from '../sandbox/end-sandbox.ts';
import { takeIds, withOrWithoutIds } from '../sandbox/sandbox-ids.ts';
import {
  checkSandboxName,
  randomSandboxName,
  readRecord,
  type SandboxRecord,
  settleRecord,
  writeRecord,
} from '../sandbox/sandbox-record.ts';
import { listSandboxes, reclaimSandboxes, removeSandbox } from '../sandbox/sandboxes.ts';
import { type RuntimeFolders, runtimeFolders, sandboxFolders } from '../sandbox/state-folders.ts';
import { type Capability, needs } from '../sandbox-api/capabilities.ts';
import { capabilitiesFor } from '../sandbox-api/limits.ts';
import {
  type CreateOptions,
  launchResident,
  makeLockFolder,
  refuseWithoutRoot,
  residentRecord,
} from './create-sandbox.ts';
import { endNow, OWN_FEATURES, ResidentSandbox } from './resident-sandbox.ts';

export interface NodeOptions {
  readonly agent: AgentBinary;
  readonly folders?: Partial<RuntimeFolders>;
  readonly spoolLimits?: SpoolLimits;
  readonly onNote?: (text: string) => void;
  readonly network?: Pick<NodeNetworkOptions, 'upstreams'>;
}

/** More of them than this, and those of sandboxes that were removed are looked for. */
const MOST_REQUESTS = 1000;
const SETTLE_MS = 1_000;
const NO_FEATURES: ReadonlySet<Capability> = new Set();

export function keeperSocket(runDir: string): string {
  return join(runDir, 'keeper.sock');
}

export class SandboxNode {
  private readonly options: NodeOptions;
  private readonly folders: RuntimeFolders;
  private readonly network: NodeNetwork;
  private keeper: KeeperChannel | undefined;
  private opening: Promise<KeeperChannel> | undefined;
  private readonly running = new Map<string, ResidentSandbox>();
  /** By request id: creations under way. */
  private readonly creating = new Map<string, Promise<ResidentSandbox>>();
  /** Name by request id, of those that have ended; their records say whether it still holds. */
  private readonly endedRequests = new Map<string, string>();
  private mostRequests = MOST_REQUESTS;
  private closing = false;
  private reclaiming: NodeJS.Timeout | undefined;

  private constructor(options: NodeOptions, folders: RuntimeFolders) {
    this.options = options;
    this.folders = folders;
    const logOf = (name: string) => join(sandboxFolders(folders, name).folder, 'denied.jsonl');
    this.network = new NodeNetwork({ runDir: folders.runDir, logOf, onNote: options.onNote, ...options.network });
  }

  /** Takes over what a process before this one had. @throws RUNTIME_NEEDS_ROOT, RUNTIME_KEEPER_GONE, RUNTIME_AGENT_PROTOCOL */
  static async open(options: NodeOptions): Promise<SandboxNode> {
    refuseWithoutRoot();
    const folders = runtimeFolders(options.folders);
    mkdirSync(folders.runDir, { recursive: true, mode: 0o755 });
    const node = new SandboxNode(options, folders);
    for (const record of listSandboxes(folders)) node.noteRequest(record);
    const found = await KeeperChannel.find(keeperSocket(folders.runDir));
    if (found !== undefined) await node.takeOver(found);
    await node.network.sweep();
    return node;
  }

  /** A creation that failed leaves nothing. @throws RUNTIME_SANDBOX_EXISTS, RUNTIME_*, MOUNT_*, STORE_* */
  async create(options: CreateOptions): Promise<ResidentSandbox> {
    const { requestId, runtime = OWN_BACKEND } = options;
    const isKnown = RUNTIME_NAMES.some((name) => name === runtime);
    const backend = { name: runtime, features: isKnown ? OWN_FEATURES : NO_FEATURES };
    if (isKnown && runtime !== OWN_BACKEND) findOciRuntime(runtime);
    for (const capability of ['resident' as const, ...capabilitiesFor(options)]) needs(backend, capability);
    if (requestId === undefined) return this.createMapped(options);
    const before =
      this.creating.get(requestId) ??
      [...this.running.values()].find((one) => one.facts.resident?.requestId === requestId);
    if (before !== undefined) return before;
    const ended = this.endedWith(requestId);
    if (ended !== undefined)
      throw fail('RUNTIME_SANDBOX_GONE', { name: ended.name, reason: ended.end?.detail ?? 'it was created before' });
    const creating = this.createMapped(options).finally(() => this.creating.delete(requestId));
    this.creating.set(requestId, creating);
    return creating;
  }

  /** @throws RUNTIME_SANDBOX_NOT_FOUND, RUNTIME_SANDBOX_GONE */
  get(name: string): ResidentSandbox {
    const found = this.running.get(name);
    if (found !== undefined) return found;
    const record = this.record(name);
    if (record?.state === 'kept') {
      throw fail('RUNTIME_SANDBOX_GONE', { name, reason: record.end?.detail ?? 'its command has ended' });
    }
    if (record !== undefined && record.resident === undefined) {
      const remedy =
        'it was started by `dsec run`, and runs that one command; `dsec sandbox create` makes one that takes commands';
      throw fail('RUNTIME_SANDBOX_RUNNING', { name, remedy });
    }
    throw fail('RUNTIME_SANDBOX_NOT_FOUND', { name });
  }

  list(): ResidentSandbox[] {
    return [...this.running.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  }

  /** Legal in every state. @throws RUNTIME_SANDBOX_NOT_FOUND */
  async stop(name: string, options: { readonly timeMs?: number } = {}) {
    const found = this.running.get(name);
    if (found !== undefined) return found.stop(options);
    const record = this.record(name);
    if (record?.resident === undefined) throw fail('RUNTIME_SANDBOX_NOT_FOUND', { name });
    return record.end ?? endNow('lost', 'it had ended');
  }

  /**
   * With all that it had; `force`: also one that runs.
   * @throws RUNTIME_SANDBOX_NOT_FOUND, RUNTIME_SANDBOX_RUNNING, RUNTIME_SANDBOX_BUSY
   */
  async remove(name: string, { force = false }: { readonly force?: boolean } = {}): Promise<void> {
    const found = this.running.get(name);
    if (found !== undefined && force) await found.destroy();
    // Ended before it was known that nobody wants it, or held by somebody else.
    if (found === undefined || !force || this.record(name) !== undefined) await removeSandbox(name, this.folders);
  }

  /** The sandboxes go on; a process that comes later takes them over. */
  async close(): Promise<void> {
    this.closing = true;
    for (const sandbox of this.running.values()) sandbox.leave();
    this.keeper?.close();
    await this.network.close();
  }

  private record(name: string): SandboxRecord | undefined {
    return readRecord(sandboxFolders(this.folders, checkSandboxName(name)).record);
  }

  private noteRequest({ name, resident }: SandboxRecord): void {
    if (resident?.requestId !== undefined) this.endedRequests.set(resident.requestId, name);
    if (this.endedRequests.size <= this.mostRequests) return;
    for (const [requestId, ended] of this.endedRequests) {
      if (!existsSync(sandboxFolders(this.folders, ended).record)) this.endedRequests.delete(requestId);
    }
    this.mostRequests = Math.max(MOST_REQUESTS, this.endedRequests.size * 2);
  }

  private endedWith(requestId: string): SandboxRecord | undefined {
    const name = this.endedRequests.get(requestId);
    const record = name === undefined ? undefined : this.record(name);
    if (record?.resident?.requestId === requestId) return record;
    this.endedRequests.delete(requestId);
    return undefined;
  }

  /** Once for all that ask at the same time: a second connection would take the place of the first. */
  private openKeeper(): Promise<KeeperChannel> {
    if (this.keeper !== undefined) return Promise.resolve(this.keeper);
    this.opening ??= KeeperChannel.open(this.options.agent, keeperSocket(this.folders.runDir))
      .then((keeper) => {
        this.watch(keeper);
        return keeper;
      })
      .finally(() => {
        this.opening = undefined;
      });
    return this.opening;
  }

  private watch(keeper: KeeperChannel): void {
    this.keeper = keeper;
    keeper.closed.then(() => {
      if (this.keeper !== keeper || this.closing) return;
      this.keeper = undefined;
      if (this.running.size > 0) this.options.onNote?.('the keeper has ended, and its sandboxes with it');
    });
  }

  private createMapped(options: CreateOptions): Promise<ResidentSandbox> {
    return withOrWithoutIds(this.folders, options.userns, (userns) => this.createNew({ ...options, userns }));
  }

  private async createNew(options: CreateOptions): Promise<ResidentSandbox> {
    const name = options.name === undefined ? randomSandboxName() : checkSandboxName(options.name);
    const { folders } = this;
    const places = sandboxFolders(folders, name);
    const keeper = await this.openKeeper();
    makeLockFolder(places);
    let record = await residentRecord(name, options, folders.stateDir);
    if (this.running.has(name)) throw fail('RUNTIME_SANDBOX_EXISTS', { name });
    const keptId = await keeper.hold(record.id, places.lock);
    if (keptId === undefined) throw fail('RUNTIME_SANDBOX_RUNNING', { name, remedy: 'choose another --name' });
    let began = false;
    let sandbox: ResidentSandbox | undefined;
    try {
      if (readRecord(places.record) !== undefined) throw fail('RUNTIME_SANDBOX_EXISTS', { name });
      began = true;
      record = { ...record, idBase: await takeIds(name, folders, options.userns, modeOf(options)) };
      if (options.network?.mode === 'policy') {
        const network = await this.network.begin(record.id, name, options.network.policy ?? DENY_ALL);
        record = { ...record, network };
      }
      mkdirSync(places.folder, { recursive: true, mode: 0o700 });
      writeRecord(places.record, record, false);
      failPoint('create-recorded');
      const noted = await launchResident(record, keeper, keptId, options, places, folders, this.options.agent.path);
      failPoint('create-launched');
      sandbox = this.adopt(noted, keeper, keptId);
      await sandbox.ready;
      this.settleLater(places.record, sandbox);
      return sandbox;
    } catch (error) {
      if (sandbox !== undefined) await sandbox.ended;
      if (began) await this.discard(record, keeper, keptId);
      else keeper.forget(keptId);
      throw error;
    }
  }

  /** Whoever wants to keep it has it on disk soon; nobody has to wait for that, and of one that is gone by then it is not done. */
  private settleLater(path: string, sandbox: ResidentSandbox): void {
    setTimeout(() => {
      if (sandbox.end === undefined) settleRecord(path);
    }, SETTLE_MS).unref();
  }

  private adopt(record: SandboxRecord, keeper: KeeperChannel, keptId: number): ResidentSandbox {
    const { folders } = this;
    const sandbox = new ResidentSandbox({
      record,
      places: sandboxFolders(folders, record.name),
      folders,
      keeper,
      keptId,
      network: this.network,
      spoolLimits: this.options.spoolLimits,
      onEnd: (ended) => {
        this.running.delete(ended.name);
        this.noteRequest(ended.facts);
        if (ended.leftSomething) this.reclaimLater();
      },
      onNote: this.options.onNote,
    });
    this.running.set(record.name, sandbox);
    return sandbox;
  }

  /** Of a creation that failed, or that nobody finished. */
  private async discard(record: SandboxRecord, keeper: KeeperChannel, keptId: number): Promise<void> {
    const places = sandboxFolders(this.folders, record.name);
    this.running.delete(record.name);
    try {
      keeper.cancel(keptId);
      await this.network.release(record.id);
      const backend = backendNamed(record.backend, this.folders.runDir);
      await dismantle(readRecord(places.record) ?? record, places, this.folders, backend);
      await removeFolder(places);
      // While the keeper holds it: a lock on a nameless file would keep nobody out.
      rmSync(places.lock, { force: true });
    } catch {
      // The record tells of it.
      this.reclaimLater();
    }
    keeper.forget(keptId);
  }

  /** What could not be undone, once more; again and again while it cannot. */
  private reclaimLater(afterMs = 1_000): void {
    this.reclaiming ??= setTimeout(async () => {
      this.reclaiming = undefined;
      if (this.closing) return;
      const { problems } = await reclaimSandboxes(this.folders).catch((error) => ({ problems: [messageOf(error)] }));
      if (problems.length > 0) this.reclaimLater(Math.min(afterMs * 2, 60_000));
    }, afterMs).unref();
  }

  private async takeOver(keeper: KeeperChannel): Promise<void> {
    this.watch(keeper);
    const records = new Map(listSandboxes(this.folders).map((record) => [record.id, record]));
    await Promise.all(keeper.kept.map((kept) => this.takeOne(keeper, kept, records.get(kept.name))));
  }

  private async takeOne(
    keeper: KeeperChannel,
    { id, state, pid, status }: Kept,
    record: SandboxRecord | undefined,
  ): Promise<void> {
    if (state === 'held' || state === 'begun' || state === 'failed' || record?.resident === undefined) {
      if (record === undefined) keeper.forget(id);
      else await this.discard(record, keeper, id);
      return;
    }
    const sandbox = this.adopt(record, keeper, id);
    if (state === 'running') {
      await sandbox.takeUp(pid).catch(() => {});
      return;
    }
    sandbox.noteEnded(status);
    await sandbox.ended;
  }
}

function modeOf({ network }: CreateOptions): 'none' | 'host' {
  return network?.mode === 'host' ? 'host' : 'none';
}
