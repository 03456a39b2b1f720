/**
 * The sandboxes that stay on this machine: creates them, finds them again after a restart, and knows each by its name. One process a
 * machine (the runtime service); the keeper and the records are what outlives it.
 */
import { existsSync, mkdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { failPoint, failPointSent, messageOf } from '#base';
import { KeeperChannel, type Kept } from '../aether/keeper-channel.ts';
import type { SpoolLimits } from '../aether/output-spool.ts';
import type { AgentBinary } from '../backend/agent-binary.ts';
import { backendNamed, RUNTIME_NAMES } from '../backend/choose-backend.ts';
import { findOciRuntime } from '../backend/oci-runtime.ts';
import { OWN_BACKEND } from '../backend/own-backend.ts';
import { fail } from '../errors.ts';
import { NodeNetwork, type NodeNetworkOptions } from '../network/node-network.ts';
import { DENY_ALL } from '../network/policy.ts';
import { dismantle, keepEnded, removeFolder } from '../sandbox/end-sandbox.ts';
import { tellingOfFullDisk } from '../sandbox/full-disk.ts';
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
import { type RuntimeFolders, runtimeFolders, type SandboxFolders, sandboxFolders } from '../sandbox/state-folders.ts';
import { BACKENDS, featuresOf } from '../sandbox-api/backend-table.ts';
import { type Capability, needs } from '../sandbox-api/capabilities.ts';
import { capabilitiesFor } from '../sandbox-api/limits.ts';
import { removeMoments } from '../vm/fork/moment.ts';
import { beginMachine, machineRecord } from '../vm/full/create-machine.ts';
import { FULL_VM, FullVmSandbox } from '../vm/full/full-vm-sandbox.ts';
import { openQemuDriver } from '../vm/qemu/qemu-driver.ts';
import { MICROVM } from '../vm/vm-backend.ts';
import { findVm, launchVm } from '../vm/vm-node.ts';
import { endDeadMaker } from '../vm/warm-pool/make-template.ts';
import { WarmPool } from '../vm/warm-pool/warm-pool.ts';
import { type AgentSandboxParts, endNow } from './agent-sandbox.ts';
import {
  type CreateOptions,
  launchResident,
  makeLockFolder,
  refuseWithoutRoot,
  residentRecord,
} from './create-sandbox.ts';
import type { NodeSandbox } from './node-sandbox.ts';
import { OWN_FEATURES, ResidentSandbox } from './resident-sandbox.ts';

export interface NodeOptions {
  readonly agent: AgentBinary;
  readonly folders?: Partial<RuntimeFolders>;
  readonly spoolLimits?: SpoolLimits;
  readonly onNote?: (text: string) => void;
  readonly network?: Pick<NodeNetworkOptions, 'upstreams'>;
  /** Virtual machines begin from templates, where their shape is asked for again and again. */
  readonly vmPool?: boolean;
}

/** More of them than this, and those of sandboxes that were removed are looked for. */
const MOST_REQUESTS = 1000;
const SETTLE_MS = 1_000;
/** Where sandboxes live unless something else is asked for. */
const CONTAINER = 'container';
const NO_FEATURES: ReadonlySet<Capability> = new Set();
const FEATURES_OF: ReadonlyMap<string, ReadonlySet<Capability>> = new Map(
  BACKENDS.map((backend) => [backend, featuresOf(backend)]),
);

export function keeperSocket(runDir: string): string {
  return join(runDir, 'keeper.sock');
}

export class SandboxNode {
  private readonly options: NodeOptions;
  private readonly folders: RuntimeFolders;
  private readonly network: NodeNetwork;
  private readonly pool: WarmPool | undefined;
  private keeper: KeeperChannel | undefined;
  private opening: Promise<KeeperChannel> | undefined;
  private readonly running = new Map<string, NodeSandbox>();
  /** How many are being made. */
  private making = 0;
  /** By request id: creations under way. */
  private readonly creating = new Map<string, Promise<NodeSandbox>>();
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
    this.pool = options.vmPool === true ? new WarmPool({ ...folders, onNote: options.onNote }) : undefined;
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
    await endDeadMaker(folders).catch((error) => options.onNote?.(messageOf(error)));
    return node;
  }

  /** A creation that failed leaves nothing. @throws RUNTIME_SANDBOX_EXISTS, RUNTIME_*, MOUNT_*, STORE_* */
  async create(options: CreateOptions): Promise<NodeSandbox> {
    const { requestId } = options;
    refuseUnsupported(options);
    if (requestId === undefined) return this.createMapped(options);
    const before =
      this.creating.get(requestId) ??
      [...this.running.values()].find((one) => one.facts.resident?.requestId === requestId);
    if (before !== undefined) return before;
    const ended = this.endedWith(requestId);
    if (ended !== undefined) {
      const { name, end } = ended;
      throw fail('RUNTIME_SANDBOX_GONE', { name, reason: end?.detail ?? 'it was created before', ended: end?.reason });
    }
    const creating = this.createMapped(options).finally(() => this.creating.delete(requestId));
    this.creating.set(requestId, creating);
    return creating;
  }

  /** @throws RUNTIME_SANDBOX_NOT_FOUND, RUNTIME_SANDBOX_GONE */
  get(name: string): NodeSandbox {
    const found = this.running.get(name);
    if (found !== undefined) return found;
    const record = this.record(name);
    if (record?.state === 'kept') {
      const { end } = record;
      throw fail('RUNTIME_SANDBOX_GONE', { name, reason: end?.detail ?? 'its command has ended', ended: end?.reason });
    }
    if (record !== undefined && record.resident === undefined) {
      const remedy =
        'it was started by `dsec run`, and runs that one command; `dsec sandbox create` makes one that takes commands';
      throw fail('RUNTIME_SANDBOX_RUNNING', { name, remedy });
    }
    throw fail('RUNTIME_SANDBOX_NOT_FOUND', { name });
  }

  list(): NodeSandbox[] {
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
    await Promise.all([...this.running.values()].map((sandbox) => sandbox.leave()));
    await this.pool?.close();
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
    const { keeper } = this;
    if (keeper !== undefined) {
      if (keeper.build === this.options.agent.build || this.running.size + this.making > 0)
        return Promise.resolve(keeper);
      // Of another build, and what it kept for us has ended.
      this.keeper = undefined;
      keeper.close();
    }
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

  private createMapped(options: CreateOptions): Promise<NodeSandbox> {
    // A machine of its own has all ids for itself.
    const make = (userns: CreateOptions['userns']) => this.createNew({ ...options, userns });
    return tellingOfFullDisk(this.folders, () =>
      options.backend === MICROVM ? make(undefined) : withOrWithoutIds(this.folders, options.userns, make),
    );
  }

  private async createNew(options: CreateOptions): Promise<NodeSandbox> {
    const name = options.name === undefined ? randomSandboxName() : checkSandboxName(options.name);
    const keeper = await this.openKeeper();
    const isContainer = options.backend !== FULL_VM && options.backend !== MICROVM;
    if (isContainer && keeper.build !== this.options.agent.build) throw fail('RUNTIME_KEEPER_BUILD', {});
    this.making++;
    try {
      return await this.createWith(keeper, name, options);
    } finally {
      this.making--;
    }
  }

  private async createWith(keeper: KeeperChannel, name: string, options: CreateOptions): Promise<NodeSandbox> {
    const { folders } = this;
    const places = sandboxFolders(folders, name);
    makeLockFolder(places);
    const isMachine = options.backend === FULL_VM;
    let record = isMachine ? machineRecord(name, options) : await residentRecord(name, options, folders.stateDir);
    if (this.running.has(name)) {
      const remedy = `end and remove it with \`dsec sandbox rm --force ${name}\``;
      throw fail('RUNTIME_SANDBOX_EXISTS', { name, how: 'is running', remedy });
    }
    const keptId = await keeper.hold(record.id, places.lock);
    if (keptId === undefined) throw fail('RUNTIME_SANDBOX_RUNNING', { name, remedy: 'choose another --name' });
    let began = false;
    let sandbox: NodeSandbox | undefined;
    try {
      if (readRecord(places.record) !== undefined) {
        const remedy = `remove it with \`dsec sandbox rm ${name}\``;
        throw fail('RUNTIME_SANDBOX_EXISTS', { name, how: 'has ended, and its changes were kept', remedy });
      }
      began = true;
      if (!isMachine && record.vm === undefined)
        record = { ...record, idBase: await takeIds(name, folders, options.userns, modeOf(options)) };
      if (options.network?.mode === 'policy') {
        const network = await this.network.begin(record.id, name, options.network.policy ?? DENY_ALL);
        record = { ...record, network };
      }
      mkdirSync(places.folder, { recursive: true, mode: 0o700 });
      writeRecord(places.record, record, false);
      failPoint('create-recorded');
      if (isMachine) {
        sandbox = this.adoptMachine(record, keeper, keptId);
        await beginMachine(sandbox as FullVmSandbox, options, folders);
        this.settleLater(places.record, sandbox);
        return sandbox;
      }
      sandbox = await this.launch(record, keeper, keptId, options, places);
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

  private async launch(
    record: SandboxRecord,
    keeper: KeeperChannel,
    keptId: number,
    options: CreateOptions,
    places: SandboxFolders,
  ): Promise<NodeSandbox> {
    const { folders } = this;
    const agent = this.options.agent.path;
    if (record.vm !== undefined) {
      const vm = await launchVm(this.partsOf(record), options, agent, () => keeper.forget(keptId), this.pool);
      this.running.set(record.name, vm);
      return vm;
    }
    const noted = await launchResident(record, keeper, keptId, options, places, folders, agent);
    await failPointSent('create-launched');
    return this.adopt(noted, keeper, keptId);
  }

  /** Whoever wants to keep it has it on disk soon; nobody has to wait for that, and of one that is gone by then it is not done. */
  private settleLater(path: string, sandbox: NodeSandbox): void {
    setTimeout(() => {
      if (sandbox.end === undefined) settleRecord(path);
    }, SETTLE_MS).unref();
  }

  private adopt(record: SandboxRecord, keeper: KeeperChannel, keptId: number): ResidentSandbox {
    const sandbox = new ResidentSandbox({ ...this.partsOf(record), keeper, keptId });
    this.running.set(record.name, sandbox);
    return sandbox;
  }

  private adoptMachine(record: SandboxRecord, keeper: KeeperChannel, keptId: number): FullVmSandbox {
    const sandbox = new FullVmSandbox({ ...this.partsOf(record), keeper, keptId, driver: openQemuDriver });
    this.running.set(record.name, sandbox);
    return sandbox;
  }

  private partsOf(record: SandboxRecord): AgentSandboxParts {
    const { folders } = this;
    return {
      record,
      places: sandboxFolders(folders, record.name),
      folders,
      network: this.network,
      spoolLimits: this.options.spoolLimits,
      onEnd: (ended) => {
        this.running.delete(ended.name);
        this.noteRequest(ended.facts);
        if (ended.leftSomething) this.reclaimLater();
      },
      onNote: this.options.onNote,
    };
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

  /** Of one whose virtual machine has gone: what it had changed stays, and why it ended is on record. */
  private async discardLost(record: SandboxRecord, keeper: KeeperChannel, keptId: number): Promise<void> {
    const places = sandboxFolders(this.folders, record.name);
    const { stopAsked, expiresAt } = record.resident!;
    const isExpired = expiresAt !== undefined && Date.parse(expiresAt) <= Date.now();
    let end = endNow('lost', 'its virtual machine has gone while no service was there');
    if (isExpired) end = endNow('expired', `its time was up at ${expiresAt}`);
    if (stopAsked === true) end = endNow('stopped', 'it was stopped');
    try {
      await this.network.release(record.id);
      await dismantle(record, places, this.folders, backendNamed(record.backend, this.folders.runDir));
      await removeMoments(places.folder);
      keepEnded(record, places, end);
    } catch {
      this.reclaimLater();
    }
    keeper.forget(keptId);
    const ended = this.record(record.name);
    if (ended !== undefined) this.noteRequest(ended);
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
    // It had ended, and the keeper was not told any more: what it changed is to stay.
    if (state === 'held' && record?.state === 'kept') return keeper.forget(id);
    if (state === 'held' && record?.machine?.ready === true) {
      const machine = this.adoptMachine(record, keeper, id);
      await machine.takeUp().catch((error) => this.options.onNote?.(messageOf(error)));
      return;
    }
    if (state === 'held' && record?.vm?.isReady === true && record.state === 'running') {
      const vm = await findVm(this.partsOf(record), () => keeper.forget(id));
      if (vm === undefined) return this.discardLost(record, keeper, id);
      this.running.set(record.name, vm);
      await vm.takeUp().catch((error) => this.options.onNote?.(messageOf(error)));
      return;
    }
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

/** @throws RUNTIME_UNSUPPORTED, RUNTIME_NO_OCI_RUNTIME */
function refuseUnsupported(options: CreateOptions): void {
  const { backend: kind = CONTAINER, runtime = OWN_BACKEND } = options;
  const isKnown = RUNTIME_NAMES.some((name) => name === runtime);
  const ofContainer = { name: runtime, features: isKnown ? OWN_FEATURES : NO_FEATURES };
  const ofOthers = { name: kind, features: FEATURES_OF.get(kind) ?? NO_FEATURES };
  const backend = kind === CONTAINER ? ofContainer : ofOthers;
  if (kind === CONTAINER && isKnown && runtime !== OWN_BACKEND) findOciRuntime(runtime);
  for (const capability of ['resident' as const, ...capabilitiesFor(options), ...wantedBy(options)]) {
    needs(backend, capability);
  }
}

/** Beside limits. */
function wantedBy({ workspace, toolkits = [], env = [], user, workdir, network }: CreateOptions): Capability[] {
  const wanted: Capability[] = [];
  if (workspace !== undefined || toolkits.length > 0) wanted.push('composition');
  if (env.length > 0 || user !== undefined || workdir !== undefined) wanted.push('environment');
  if (network?.mode === 'policy') wanted.push('network-policy');
  if (network?.mode === 'host') wanted.push('host-network');
  return wanted;
}

function modeOf({ network }: CreateOptions): 'none' | 'host' {
  return network?.mode === 'host' ? 'host' : 'none';
}
