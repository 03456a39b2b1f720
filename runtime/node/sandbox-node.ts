/**
 * The sandboxes that stay on this machine: creates them, finds them again after a restart, and knows each by its name. One process a
 * machine (the runtime service); the keeper and the records are what outlives it.
 */
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { failPoint } from '#base';
import { KeeperChannel, type Kept } from '../aether/keeper-channel.ts';
import type { SpoolLimits } from '../aether/output-spool.ts';
import type { AgentBinary } from '../backend/agent-binary.ts';
import { OWN_BACKEND, openOwnBackend } from '../backend/own-backend.ts';
import { fail } from '../errors.ts';
import { dismantle, removeFolder } from '../sandbox/end-sandbox.ts';
import {
  checkSandboxName,
  randomSandboxName,
  readRecord,
  type SandboxRecord,
  writeRecord,
} from '../sandbox/sandbox-record.ts';
import { listSandboxes } from '../sandbox/sandboxes.ts';
import { type RuntimeFolders, runtimeFolders, sandboxFolders } from '../sandbox/state-folders.ts';
import { type Capability, needs } from '../sandbox-api/capabilities.ts';
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
}

const NO_FEATURES: ReadonlySet<Capability> = new Set();

export function keeperSocket(runDir: string): string {
  return join(runDir, 'keeper.sock');
}

export class SandboxNode {
  private readonly options: NodeOptions;
  private readonly folders: RuntimeFolders;
  private keeper: KeeperChannel | undefined;
  private readonly running = new Map<string, ResidentSandbox>();
  /** By request id: creations under way. */
  private readonly creating = new Map<string, Promise<ResidentSandbox>>();
  private closing = false;

  private constructor(options: NodeOptions, folders: RuntimeFolders) {
    this.options = options;
    this.folders = folders;
  }

  /** Takes over what a process before this one had. @throws RUNTIME_NEEDS_ROOT, RUNTIME_KEEPER_GONE, RUNTIME_AGENT_PROTOCOL */
  static async open(options: NodeOptions): Promise<SandboxNode> {
    refuseWithoutRoot();
    const folders = runtimeFolders(options.folders);
    mkdirSync(folders.runDir, { recursive: true, mode: 0o755 });
    const node = new SandboxNode(options, folders);
    const found = await KeeperChannel.find(keeperSocket(folders.runDir));
    if (found !== undefined) await node.takeOver(found);
    return node;
  }

  /** A creation that failed leaves nothing. @throws RUNTIME_SANDBOX_EXISTS, RUNTIME_*, MOUNT_*, STORE_* */
  async create(options: CreateOptions): Promise<ResidentSandbox> {
    const { requestId, runtime = OWN_BACKEND } = options;
    needs({ name: runtime, features: runtime === OWN_BACKEND ? OWN_FEATURES : NO_FEATURES }, 'resident');
    if (requestId === undefined) return this.createNew(options);
    const before =
      this.creating.get(requestId) ??
      [...this.running.values()].find((one) => one.facts.resident?.requestId === requestId);
    if (before !== undefined) return before;
    const ended = listSandboxes(this.folders).find((record) => record.resident?.requestId === requestId);
    if (ended !== undefined)
      throw fail('RUNTIME_SANDBOX_GONE', { name: ended.name, reason: ended.end?.detail ?? 'it was created before' });
    const creating = this.createNew(options).finally(() => this.creating.delete(requestId));
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

  /** The sandboxes go on; a process that comes later takes them over. */
  close(): void {
    this.closing = true;
    this.keeper?.close();
  }

  private record(name: string): SandboxRecord | undefined {
    return readRecord(sandboxFolders(this.folders, checkSandboxName(name)).record);
  }

  private async openKeeper(): Promise<KeeperChannel> {
    if (this.keeper !== undefined) return this.keeper;
    const keeper = await KeeperChannel.open(this.options.agent, keeperSocket(this.folders.runDir));
    this.watch(keeper);
    return keeper;
  }

  private watch(keeper: KeeperChannel): void {
    this.keeper = keeper;
    keeper.closed.then(() => {
      if (this.keeper !== keeper || this.closing) return;
      this.keeper = undefined;
      if (this.running.size > 0) this.options.onNote?.('the keeper has ended, and its sandboxes with it');
    });
  }

  private async createNew(options: CreateOptions): Promise<ResidentSandbox> {
    const name = options.name === undefined ? randomSandboxName() : checkSandboxName(options.name);
    const { folders } = this;
    const places = sandboxFolders(folders, name);
    const keeper = await this.openKeeper();
    makeLockFolder(places);
    const record = residentRecord(name, options);
    if (this.running.has(name)) throw fail('RUNTIME_SANDBOX_EXISTS', { name });
    const keptId = await keeper.hold(record.id, places.lock);
    if (keptId === undefined) throw fail('RUNTIME_SANDBOX_RUNNING', { name, remedy: 'choose another --name' });
    let began = false;
    let sandbox: ResidentSandbox | undefined;
    try {
      if (readRecord(places.record) !== undefined) throw fail('RUNTIME_SANDBOX_EXISTS', { name });
      began = true;
      mkdirSync(places.folder, { recursive: true, mode: 0o700 });
      writeRecord(places.record, record, true);
      failPoint('create-recorded');
      const noted = await launchResident(record, keeper, keptId, options, places, folders);
      failPoint('create-launched');
      sandbox = this.adopt(noted, keeper, keptId);
      await sandbox.ready;
      return sandbox;
    } catch (error) {
      if (sandbox !== undefined) await sandbox.ended;
      if (began) await this.discard(record, keeper, keptId);
      else keeper.forget(keptId);
      throw error;
    }
  }

  private adopt(record: SandboxRecord, keeper: KeeperChannel, keptId: number): ResidentSandbox {
    const { folders } = this;
    const sandbox = new ResidentSandbox({
      record,
      places: sandboxFolders(folders, record.name),
      folders,
      keeper,
      keptId,
      spoolLimits: this.options.spoolLimits,
      onEnd: (ended) => this.running.delete(ended.name),
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
      await dismantle(readRecord(places.record) ?? record, places, this.folders, openOwnBackend(undefined));
      await removeFolder(places);
    } catch {
      // The record tells the next command of it.
    }
    keeper.forget(keptId);
  }

  private async takeOver(keeper: KeeperChannel): Promise<void> {
    this.watch(keeper);
    const records = new Map(listSandboxes(this.folders).map((record) => [record.id, record]));
    await Promise.all(keeper.kept.map((kept) => this.takeOne(keeper, kept, records.get(kept.name))));
  }

  private async takeOne(
    keeper: KeeperChannel,
    { id, state, status }: Kept,
    record: SandboxRecord | undefined,
  ): Promise<void> {
    if (state === 'held' || state === 'begun' || state === 'failed' || record?.resident === undefined) {
      if (record === undefined) keeper.forget(id);
      else await this.discard(record, keeper, id);
      return;
    }
    const sandbox = this.adopt(record, keeper, id);
    if (state === 'running') {
      await sandbox.resume().catch(() => {});
      return;
    }
    sandbox.noteEnded(status);
    await sandbox.ended;
  }
}
