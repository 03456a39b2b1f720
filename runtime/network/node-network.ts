/**
 * The networks of a node's sandboxes with a policy. Each has a number, from which its addresses and the name of its link follow, a table of
 * rules, and a link.
 *
 * What has to be undone is known from the record, which is written first; what this process does not get to undo, because it dies, is found by
 * the next one: links are named by number, and tables have names. Nothing is open in between: a link passes nothing before it is known, what
 * is known without a table is denied all, and a table takes the place of another in one step.
 */
import { closeSync, openSync } from 'node:fs';
import { failPoint, messageOf } from '#base';
import { networkNamespaceOf } from '#linux';
import { fail } from '../errors.ts';
import type { AddressRange } from './address.ts';
import { addressBytes } from './address.ts';
import {
  freeNumber,
  LINK_PREFIX,
  type NetworkPool,
  networkMask4,
  networkPool,
  sandboxAddresses,
} from './address-pool.ts';
import { closedRanges } from './closed-ranges.ts';
import { type DeniedAttempt, DeniedLog } from './denied-log.ts';
import type { DeniedPacket } from './denied-packet.ts';
import { hasMachineNetwork, MachineNetwork, removeMachineNetwork } from './machine-network.ts';
import type { PolicyNetwork } from './network-facts.ts';
import type { OpenedAddresses, SandboxNames } from './opened-addresses.ts';
import type { LinkCounters } from './packet-filter.ts';
import { expandServices, type NetworkPolicy } from './policy.ts';
import type { DeniedName } from './resolver/sandbox-answers.ts';
import type { UpstreamServer } from './resolver/upstream-servers.ts';
import {
  guardLink,
  guestMessages,
  isTapOf,
  linksNamed,
  makeSandboxLink,
  makeSandboxTap,
  movedGuestMessages,
  namespaceCookie,
  removeSandboxLink,
  sandboxLink,
  tapOwner,
} from './sandbox-link.ts';
import { SandboxPolicy } from './sandbox-policy.ts';
import { readServiceTable } from './service-table.ts';

export interface NetworkedSandbox {
  /** Of its record. */
  readonly id: string;
  readonly name: string;
  readonly network: PolicyNetwork;
}

export interface NodeNetworkOptions {
  readonly runDir: string;
  /** Path of the log of a sandbox, by its name. */
  readonly logOf: (name: string) => string;
  readonly onNote?: (text: string) => void;
  /** Whom the resolver asks; those of this machine by default. */
  readonly upstreams?: readonly UpstreamServer[];
}

export interface NetworkCounters extends LinkCounters {
  /** Addresses that names have led to, those that have expired included. */
  readonly openedAddresses: number;
}

export interface ConnectedTap {
  readonly tap: string;
  readonly mac: string;
  /** For the guest's kernel: rtnetlink. */
  readonly messages: ReturnType<typeof guestMessages>;
}

interface Attached {
  readonly number: number;
  readonly id: string;
  readonly log: DeniedLog;
  /** Names, for the log. */
  readonly waiting: DeniedAttempt[];
  policy: SandboxPolicy;
  link: number | undefined;
  cookie: bigint | undefined;
  /** Its first table is there. */
  begun: Promise<void>;
  /** Changes of its table, one after the other. Never rejects. */
  changing: Promise<void>;
}

const POLL_MS = 500;
const SECOND_NS = 1e9;
const PROTOCOL_NAMES: Readonly<Record<number, string>> = { 1: 'icmp', 6: 'tcp', 17: 'udp', 58: 'icmp' };
const DNS_PORT = 53;
const MAX_WAITING = 1000;
const UDP = 17;

export class NodeNetwork implements OpenedAddresses {
  private readonly options: NodeNetworkOptions;
  private readonly pool: NetworkPool;
  private readonly closed: readonly AddressRange[];
  private readonly byNumber = new Map<number, Attached>();
  private readonly byId = new Map<string, Attached>();
  private readonly byAddress = new Map<string, Attached>();
  /** By id: links under way. */
  private readonly connecting = new Map<string, Promise<void>>();
  private lastNumber = -1;
  private opening: Promise<MachineNetwork> | undefined;
  private ended: Promise<void> | undefined;
  private machine: MachineNetwork | undefined;
  private timer: NodeJS.Timeout | undefined;

  /** @throws RUNTIME_NETWORK_POOL */
  constructor(options: NodeNetworkOptions) {
    this.options = options;
    this.pool = networkPool();
    this.closed = closedRanges(this.pool);
  }

  /**
   * A number for a sandbox that is about to be made, and its table. To be released, whatever becomes of it.
   * @throws RUNTIME_NETWORK*
   */
  async begin(id: string, name: string, policy: NetworkPolicy): Promise<PolicyNetwork> {
    const rules = expandServices(policy, readServiceTable());
    const compiled = new SandboxPolicy(rules, this.closed);
    const machine = await this.ready();
    const number = this.takeNumber();
    const { ipv4, ipv6 } = sandboxAddresses(this.pool, number);
    const attached = this.attach(number, id, name, compiled);
    attached.begun = this.change(attached, async () => {
      await machine.filter.setRows(number, compiled.table());
      failPoint('network-table');
    });
    attached.begun.catch(() => {});
    return { mode: 'policy', number, ipv4, ipv6, policy, rules };
  }

  /** Gives a sandbox its link; `pid` is its first process. One that has it already goes on with it. @throws RUNTIME_NETWORK */
  async connect(sandbox: NetworkedSandbox, pid: number): Promise<void> {
    const connecting = this.connectNow(sandbox, pid);
    this.connecting.set(sandbox.id, connecting);
    try {
      await connecting;
    } finally {
      this.connecting.delete(sandbox.id);
    }
  }

  /**
   * Gives a sandbox that is a virtual machine its link, a tap, before the machine runs or while it does. What is told to its kernel is the answer.
   * @param options.asks Nobody tells it: its guest asks the link itself (guest-answers.ts).
   * @param options.was Number of the network that its guest has been on, which it leaves by the messages.
   * @param options.cardOf Number of the network whose hardware address its card has; its own by default.
   * @throws RUNTIME_NETWORK
   */
  async connectTap(
    { id, name, network }: NetworkedSandbox,
    { asks = false, was, cardOf }: { readonly asks?: boolean; readonly was?: number; readonly cardOf?: number } = {},
  ): Promise<ConnectedTap> {
    const connecting = (async () => {
      const machine = await this.ready();
      const attached = this.byId.get(id) ?? (await this.takeUp({ id, name, network }, machine));
      await attached.begun;
      const { number } = attached;
      const { mac: card } = sandboxAddresses(this.pool, cardOf ?? number);
      const mine = { ...sandboxAddresses(this.pool, number), mac: card };
      const { gateway4, gateway6 } = this.pool;
      const mask4 = asks ? networkMask4(this.pool) : undefined;
      attached.link = await makeSandboxTap(mine, tapOwner(this.options.runDir, id), (link) => {
        machine.filter.addLink(link, { number, ipv4: mine.ipv4, ipv6: mine.ipv6, gateway4, gateway6, mask4 });
        attached.link = link;
        failPoint('network-linked');
        return machine.filter.program;
      });
      failPoint('network-connected');
      const mac = [...mine.mac].map((byte) => byte.toString(16).padStart(2, '0')).join(':');
      const messages =
        was === undefined
          ? guestMessages(mine, this.pool)
          : movedGuestMessages(sandboxAddresses(this.pool, was), mine, this.pool);
      return { tap: mine.link, mac, messages };
    })();
    const waited = connecting.then(() => {});
    waited.catch(() => {});
    this.connecting.set(id, waited);
    try {
      return await connecting;
    } catch (error) {
      throw fail('RUNTIME_NETWORK', { what: `sandbox ${name}`, problem: messageOf(error) }, error);
    } finally {
      this.connecting.delete(id);
    }
  }

  private async connectNow({ id, name, network }: NetworkedSandbox, pid: number): Promise<void> {
    try {
      const machine = await this.ready();
      const attached = this.byId.get(id) ?? (await this.takeUp({ id, name, network }, machine));
      await attached.begun;
      const namespace = openSync(`/proc/${pid}/ns/net`, 'r');
      try {
        if (networkNamespaceOf(pid) === networkNamespaceOf('thread-self')) throw new Error('it has none of its own');
        failPoint('network-begun');
        await this.link(attached, namespace, machine);
        failPoint('network-connected');
      } finally {
        closeSync(namespace);
      }
    } catch (error) {
      throw fail('RUNTIME_NETWORK', { what: `sandbox ${name}`, problem: messageOf(error) }, error);
    }
  }

  /**
   * Another policy, from now on. When this resolves, it is on record and holds for every packet.
   * @param note Puts it on record; when that fails, nothing has changed.
   * @throws RUNTIME_NETWORK_POLICY, RUNTIME_NETWORK_SERVICES
   */
  async setPolicy(id: string, policy: NetworkPolicy, note: (network: Partial<PolicyNetwork>) => void): Promise<void> {
    const rules = expandServices(policy, readServiceTable());
    const next = new SandboxPolicy(rules, this.closed);
    const machine = await this.ready();
    const attached = this.byId.get(id);
    if (attached === undefined)
      throw fail('RUNTIME_NETWORK', { what: 'the policy', problem: 'the sandbox is being ended' });
    await this.change(attached, async () => {
      note({ policy, rules });
      failPoint('policy-recorded');
      next.takeOver(attached.policy);
      // What the resolver opens from here on it opens in both tables.
      attached.policy = next;
      await machine.filter.setRows(attached.number, next.table());
      failPoint('policy-applied');
    });
  }

  /** All that it has. Of one that has nothing (any more) as well. */
  async release(id: string): Promise<void> {
    await this.connecting.get(id)?.catch(() => {});
    const attached = this.byId.get(id);
    if (attached === undefined) return;
    this.byId.delete(id);
    const machine = await this.opening?.catch(() => undefined);
    await attached.changing;
    this.poll();
    const { number } = attached;
    const { ipv4, ipv6 } = sandboxAddresses(this.pool, number);
    for (const address of [ipv4, ipv6]) this.byAddress.delete(addressKey(address));
    // The link itself goes with its namespace; it passes nothing any more, and its number is free when it is gone.
    if (attached.link !== undefined) machine?.filter.removeLink(attached.link);
    failPoint('network-unlinked');
    await machine?.filter.removeRows(number);
    failPoint('network-released');
    this.byNumber.delete(number);
  }

  /** Undefined: it is being ended, or made. */
  counters(id: string): NetworkCounters | undefined {
    const attached = this.byId.get(id);
    const counters = attached?.link === undefined ? undefined : this.machine?.filter.counters(attached.link);
    return counters && attached && { ...counters, openedAddresses: attached.policy.openedCount };
  }

  /** The latest attempts, oldest first. */
  denied(name: string, limit?: number): DeniedAttempt[] {
    this.poll();
    return new DeniedLog(this.options.logOf(name)).read(limit);
  }

  /** What a process before this one left and nobody has taken up. Never fails: what stays passes nothing. */
  async sweep(): Promise<void> {
    try {
      await this.sweepAll();
    } catch (error) {
      this.options.onNote?.(`networks of sandboxes that have ended: ${messageOf(error)}`);
    }
  }

  private async sweepAll(): Promise<void> {
    const { runDir } = this.options;
    const mine = linksNamed(LINK_PREFIX).filter(({ owner }) => this.isOurs(owner));
    for (const { name } of mine) if (!this.byNumber.has(numberIn(name))) removeSandboxLink(name);
    if (this.opening === undefined && !hasMachineNetwork(runDir)) return;
    if (this.byNumber.size === 0 && this.opening === undefined)
      return removeMachineNetwork({ runDir, pool: this.pool });
    const { filter } = await this.ready();
    const links = new Set([...this.byNumber.values()].map(({ link }) => link));
    for (const link of filter.links()) if (!links.has(link)) filter.removeLink(link);
    for (const number of filter.sandboxes()) if (!this.byNumber.has(number)) await filter.removeRows(number);
    filter.forgetOthers();
  }

  /** What sandboxes have stays as it is; without any, nothing does. */
  close(): Promise<void> {
    // A second time its descriptors may be somebody else's.
    this.ended ??= this.end();
    return this.ended;
  }

  private async end(): Promise<void> {
    clearInterval(this.timer);
    const machine = await this.opening?.catch(() => undefined);
    if (machine === undefined) return;
    this.poll();
    machine.close();
    this.machine = undefined;
    if (this.byNumber.size > 0) return;
    for (const { name, owner } of linksNamed(LINK_PREFIX)) if (this.isOurs(owner)) removeSandboxLink(name);
    await machine.remove();
  }

  sandboxAt(address: string): string | undefined {
    return this.byAddress.get(addressKey(address))?.id;
  }

  namesOf(id: string): SandboxNames | undefined {
    return this.byId.get(id)?.policy.names;
  }

  /** For the resolver; see OpenedAddresses. */
  open(id: string, name: string, addresses: readonly string[], ttlSeconds: number): readonly string[] {
    const attached = this.byId.get(id);
    const { machine } = this;
    if (attached === undefined || machine === undefined) return [];
    const { policy, number } = attached;
    const expires = process.hrtime.bigint() + BigInt(Math.ceil(Math.max(1, ttlSeconds) * SECOND_NS));
    const opened = addresses.filter((address) => {
      const found = policy.open(name, address, expires);
      return found !== undefined && (found.row === undefined || machine.filter.setRow(number, found.row));
    });
    for (const range of policy.surplus()) {
      const row = policy.staticRow(range);
      if (row === undefined) machine.filter.removeRow(number, range);
      else machine.filter.setRow(number, row);
    }
    return opened;
  }

  /** Links of ours are told from those of others by it. */
  private get owner(): string {
    return `dsec ${this.options.runDir}`;
  }

  private isOurs(owner: string): boolean {
    return owner === this.owner || isTapOf(this.options.runDir, owner);
  }

  private ready(): Promise<MachineNetwork> {
    this.opening ??= this.openMachine().catch((error) => {
      this.opening = undefined;
      throw error;
    });
    return this.opening;
  }

  private async openMachine(): Promise<MachineNetwork> {
    const { runDir, onNote, upstreams } = this.options;
    const denied = (name: DeniedName) => this.nameDenied(name);
    const machine = await MachineNetwork.open({ runDir, pool: this.pool, opened: this, denied, onNote, upstreams });
    this.machine = machine;
    this.timer = setInterval(() => this.poll(), POLL_MS);
    this.timer.unref();
    return machine;
  }

  /** Links of sandboxes that have ended may be there for a while. @throws RUNTIME_NETWORK_FULL */
  private takeNumber(): number {
    const used = new Set(this.byNumber.keys());
    for (;;) {
      const number = freeNumber(this.pool, used, this.lastNumber);
      this.lastNumber = number;
      if (sandboxLink(sandboxAddresses(this.pool, number).link) === undefined) return number;
      used.add(number);
    }
  }

  private attach(number: number, id: string, name: string, policy: SandboxPolicy): Attached {
    const log = new DeniedLog(this.options.logOf(name));
    const attached: Attached = {
      number,
      id,
      log,
      waiting: [],
      policy,
      link: undefined,
      cookie: undefined,
      begun: Promise.resolve(),
      changing: Promise.resolve(),
    };
    const { ipv4, ipv6 } = sandboxAddresses(this.pool, number);
    this.byNumber.set(number, attached);
    this.byId.set(id, attached);
    for (const address of [ipv4, ipv6]) this.byAddress.set(addressKey(address), attached);
    return attached;
  }

  /** One that runs since before this process did: what its names have opened stays open. */
  private async takeUp({ id, name, network }: NetworkedSandbox, machine: MachineNetwork): Promise<Attached> {
    const { number, rules } = network;
    const mine = sandboxAddresses(this.pool, number);
    if (mine.ipv4 !== network.ipv4 || mine.ipv6 !== network.ipv6) {
      throw new Error(
        `its addresses ${network.ipv4} and ${network.ipv6} are not of the ranges ${this.pool.ipv4.text} and ${this.pool.ipv6.text}`,
      );
    }
    const policy = new SandboxPolicy(rules, this.closed);
    policy.takeOverRows(machine.filter.openedRows(number));
    const attached = this.attach(number, id, name, policy);
    await this.change(attached, () => machine.filter.setRows(number, policy.table()));
    return attached;
  }

  private async link(attached: Attached, namespace: number, { filter }: MachineNetwork): Promise<void> {
    const { number } = attached;
    const mine = sandboxAddresses(this.pool, number);
    const { gateway4, gateway6 } = this.pool;
    const guard = (link: number) => {
      filter.addLink(link, { number, ipv4: mine.ipv4, ipv6: mine.ipv6, gateway4, gateway6 });
      attached.link = link;
      failPoint('network-linked');
      return filter.program;
    };
    const found =
      sandboxLink(mine.link) === undefined ? undefined : linksNamed(mine.link).find(({ name }) => name === mine.link);
    if (found?.owner === this.owner) {
      guardLink(found.link, guard(found.link));
      attached.cookie = namespaceCookie(namespace);
      return;
    }
    // Half made.
    if (found !== undefined) removeSandboxLink(mine.link);
    attached.cookie = (await makeSandboxLink(namespace, mine, this.pool, this.owner, guard)).cookie;
  }

  /** One after the other; what fails leaves the way free for the next. */
  private change(attached: Attached, work: () => Promise<void>): Promise<void> {
    const done = attached.changing.then(work);
    attached.changing = done.catch(() => {});
    return done;
  }

  private poll(): void {
    const { machine } = this;
    if (machine === undefined) return;
    const told = new Set([...this.byNumber.values()].filter(({ waiting }) => waiting.length > 0));
    for (const packet of machine.filter.denied()) {
      const attached = this.byNumber.get(packet.sandbox);
      if (attached === undefined || attached.link !== packet.link) continue;
      attached.waiting.push(this.attemptOf(packet, attached, machine));
      told.add(attached);
    }
    for (const { log, waiting } of told) log.append(waiting.splice(0));
  }

  private attemptOf(packet: DeniedPacket, { policy, cookie }: Attached, { notes }: MachineNetwork): DeniedAttempt {
    const { at, source, destination, destinationBytes, port, protocol, reason } = packet;
    const agoMs = Number(process.hrtime.bigint() - at) / 1e6;
    return {
      time: new Date(Date.now() - agoMs).toISOString(),
      kind: 'packet',
      destination,
      port,
      protocol: PROTOCOL_NAMES[protocol] ?? String(protocol),
      reason,
      source,
      name: policy.nameOf(destinationBytes),
      ...(cookie === undefined ? undefined : notes?.find(cookie, destinationBytes, port, protocol)),
      count: 1,
    };
  }

  private nameDenied({ sandbox, name = '', type, reason, from }: DeniedName): void {
    const attached = this.byId.get(sandbox);
    if (attached === undefined) return;
    const { waiting, cookie } = attached;
    const gateway = addressBytes(from.address.includes(':') ? this.pool.gateway6 : this.pool.gateway4)!;
    // Whoever asked last: questions of one sandbox all go to one address.
    const program = cookie === undefined ? undefined : this.machine?.notes?.find(cookie, gateway, DNS_PORT, UDP);
    const time = new Date().toISOString();
    waiting.push({ time, kind: 'name', destination: name, protocol: type, reason, ...program, count: 1 });
    // Who asks again and again is told of in few lines, and never by as many as we can hold.
    if (waiting.length >= MAX_WAITING) this.poll();
  }
}

function numberIn(link: string): number {
  return Number(link.slice(LINK_PREFIX.length));
}

/** The same for each way to write an address. */
function addressKey(address: string): string {
  return addressBytes(address)?.toString('latin1') ?? '';
}
