/** The network of one sandbox that stays, as those see it who ask about it. What it has is on its record; what it does the node's network knows. */
import { fail } from '../errors.ts';
import type { DeniedAttempt } from '../network/denied-log.ts';
import type { NetworkMode, PolicyNetwork } from '../network/network-facts.ts';
import type { NetworkCounters, NodeNetwork } from '../network/node-network.ts';
import type { NetworkPolicy } from '../network/policy.ts';
import type { SandboxRecord } from '../sandbox/sandbox-record.ts';

export interface NetworkView {
  readonly mode: NetworkMode;
  readonly ipv4?: string;
  readonly ipv6?: string;
  readonly policy?: NetworkPolicy;
}

export interface NetworkHost {
  readonly node: NodeNetwork;
  readonly record: () => SandboxRecord;
  readonly refuseEnded: () => void;
  readonly note: (network: PolicyNetwork) => void;
}

export class ResidentNetwork {
  private readonly host: NetworkHost;

  constructor(host: NetworkHost) {
    this.host = host;
  }

  /** Its first process runs: it gets its link, if it is to have one. @throws RUNTIME_NETWORK */
  async begin(pid: number): Promise<void> {
    const { id, name, network } = this.host.record();
    if (network?.mode === 'policy') await this.host.node.connect({ id, name, network }, pid);
  }

  async end(): Promise<void> {
    await this.host.node.release(this.host.record().id);
  }

  view(): NetworkView {
    const { network } = this.host.record();
    if (network?.mode !== 'policy') return { mode: network?.mode ?? 'none' };
    const { mode, ipv4, ipv6, policy } = network;
    return { mode, ipv4, ipv6, policy };
  }

  /** Holds for every packet once this resolves. @throws RUNTIME_NETWORK_NONE, RUNTIME_NETWORK_POLICY, RUNTIME_SANDBOX_GONE */
  async setPolicy(policy: NetworkPolicy): Promise<NetworkView> {
    const { node, note } = this.host;
    const { id } = this.policied();
    this.host.refuseEnded();
    await node.setPolicy(id, policy, (change) => note({ ...this.policied().network, ...change }));
    return this.view();
  }

  /** @throws RUNTIME_NETWORK_NONE, RUNTIME_SANDBOX_GONE */
  counters(): NetworkCounters {
    const { id, name } = this.policied();
    this.host.refuseEnded();
    const found = this.host.node.counters(id);
    if (found === undefined) throw fail('RUNTIME_SANDBOX_GONE', { name, reason: 'it is being ended' });
    return found;
  }

  /** The latest attempts, oldest first. @throws RUNTIME_NETWORK_NONE */
  denied(limit?: number): DeniedAttempt[] {
    return this.host.node.denied(this.policied().name, limit);
  }

  private policied() {
    const { id, name, network } = this.host.record();
    if (network?.mode !== 'policy') throw fail('RUNTIME_NETWORK_NONE', { name, mode: network?.mode ?? 'none' });
    return { id, name, network };
  }
}
