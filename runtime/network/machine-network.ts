/**
 * What all sandboxes with a policy share on this machine: the resolver and its addresses, the machine's packet filter, forwarding, and the
 * program with its tables. Set up with the first of them; taken away when a process ends that has none. Another process's is left alone: who
 * has the resolver's port has the machine's network.
 */
import { chmodSync, existsSync, mkdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { failPoint, messageOf, systemCode } from '#base';
import { mountsAt } from '#linux';
import { fail } from '../errors.ts';
import { LINK_PREFIX, type NetworkPool } from './address-pool.ts';
import { closedRanges } from './closed-ranges.ts';
import { allowForwarding, removeHostFilter, setHostFilter } from './host-filter.ts';
import type { OpenedAddresses } from './opened-addresses.ts';
import { PacketFilter, removePacketFilter } from './packet-filter.ts';
import { ProgramNotes } from './program-notes.ts';
import { Resolver } from './resolver/resolver.ts';
import type { DeniedName } from './resolver/sandbox-answers.ts';
import type { UpstreamServer } from './resolver/upstream-servers.ts';
import { addGatewayAddresses, linksNamed, removeGatewayAddresses } from './sandbox-link.ts';

export interface MachineOptions {
  readonly runDir: string;
  readonly pool: NetworkPool;
  readonly opened: OpenedAddresses;
  readonly denied: (denied: DeniedName) => void;
  readonly onNote?: (text: string) => void;
  readonly upstreams?: readonly UpstreamServer[];
}

const filterFolder = (runDir: string) => join(runDir, 'network', 'bpf');

export class MachineNetwork {
  readonly filter: PacketFilter;
  /** Undefined where the kernel has no hooks for it. */
  readonly notes: ProgramNotes | undefined;
  private readonly options: MachineOptions;
  private readonly resolver: Resolver;

  private constructor(
    options: MachineOptions,
    resolver: Resolver,
    filter: PacketFilter,
    notes: ProgramNotes | undefined,
  ) {
    this.options = options;
    this.resolver = resolver;
    this.filter = filter;
    this.notes = notes;
  }

  /** With what a process before this one left. @throws RUNTIME_NETWORK, RUNTIME_NETWORK_NO_NFT */
  static async open(options: MachineOptions): Promise<MachineNetwork> {
    const { runDir, pool, opened, denied, upstreams, onNote } = options;
    makeShownFiles(runDir, pool);
    addGatewayAddresses(pool);
    const addresses = [pool.gateway4, pool.gateway6].map((address) => ({ address }));
    const resolver = await Resolver.open({ opened, denied, upstreams, addresses }).catch((error) => {
      const taken = systemCode(error) === 'EADDRINUSE';
      // What is there is somebody else's.
      if (taken) removeShownFiles(runDir);
      const problem = taken
        ? `port 53 of ${pool.gateway4} is taken, by another \`dsec serve runtime\` or by a resolver that listens everywhere`
        : messageOf(error);
      throw fail('RUNTIME_NETWORK', { what: 'the resolver', problem }, error);
    });
    try {
      failPoint('machine-resolver');
      allowForwarding();
      await setHostFilter(pool);
      failPoint('machine-filtered');
      const filter = PacketFilter.open(filterFolder(runDir));
      filter.closeRanges(closedRanges(pool));
      failPoint('machine-ready');
      return new MachineNetwork(options, resolver, filter, openNotes(onNote));
    } catch (error) {
      resolver.close();
      throw error;
    }
  }

  /** Of the machine: to be shown inside. */
  close(): void {
    this.resolver.close();
    this.notes?.close();
    this.filter.close();
  }

  /** After `close`, for the last. What another process has stays. */
  async remove(): Promise<void> {
    await removeMachineNetwork(this.options);
  }
}

/** What may be left of a process that was killed. */
export function hasMachineNetwork(runDir: string): boolean {
  // The files are made before all else.
  return existsSync(shownFiles(runDir).resolver) || mountsAt(filterFolder(runDir)).length > 0;
}

export async function removeMachineNetwork({ runDir, pool }: Pick<MachineOptions, 'runDir' | 'pool'>): Promise<void> {
  removePacketFilter(filterFolder(runDir));
  if (linksNamed(LINK_PREFIX).length === 0) {
    removeGatewayAddresses(pool);
    await removeHostFilter();
  }
  // Last: they say that there may be something.
  removeShownFiles(runDir);
}

function removeShownFiles(runDir: string): void {
  for (const file of Object.values(shownFiles(runDir))) rmSync(file, { force: true });
}

function openNotes(onNote: MachineOptions['onNote']): ProgramNotes | undefined {
  try {
    return ProgramNotes.open();
  } catch (error) {
    onNote?.(`denied attempts are logged without the program that made them: ${messageOf(error)}`);
    return undefined;
  }
}

/** Files of this machine that a sandbox sees in place of its image's. */
export function shownFiles(runDir: string): { readonly resolver: string; readonly hosts: string } {
  return { resolver: join(runDir, 'network', 'resolv.conf'), hosts: join(runDir, 'network', 'hosts') };
}

function makeShownFiles(runDir: string, { gateway4, gateway6 }: NetworkPool): void {
  const { resolver, hosts } = shownFiles(runDir);
  // Whoever makes a sandbox's mounts may be nobody on this machine by then.
  mkdirSync(join(runDir, 'network'), { recursive: true, mode: 0o755 });
  writeFileSync(resolver, `nameserver ${gateway4}\nnameserver ${gateway6}\n`);
  writeFileSync(hosts, '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n');
  for (const path of [resolver, hosts]) chmodSync(path, 0o644);
}
