/** What of its network is on a sandbox's record: enough to find all of it again, and to set it up anew. */
import type { NetworkPolicy } from './policy.ts';

export const NETWORK_MODES = ['none', 'host', 'policy'] as const;
export type NetworkMode = (typeof NETWORK_MODES)[number];

export interface PolicyNetwork {
  readonly mode: 'policy';
  /** Its addresses follow from it (address-pool.ts). */
  readonly number: number;
  readonly ipv4: string;
  readonly ipv6: string;
  /** As it was given. */
  readonly policy: NetworkPolicy;
  /** With its services as rules. */
  readonly rules: NetworkPolicy;
}

/** Nothing on record: `none`, loopback alone. */
export type NetworkFacts = { readonly mode: 'host' } | PolicyNetwork;

/** Given without one: all is denied. */
export interface NetworkOptions {
  readonly mode: NetworkMode;
  readonly policy?: NetworkPolicy;
}
