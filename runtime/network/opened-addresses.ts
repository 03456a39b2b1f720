/**
 * Between the resolver (runtime/network/resolver/) and the policy in the kernel. The resolver asks who a question comes from and what names
 * that sandbox has; before it hands an answer on it opens the addresses in it, and answers with those alone that were opened.
 *
 * All sandboxes ask the same two addresses of this machine (`gateway4` and `gateway6` of the NetworkPool, port 53, UDP and TCP), which no other machine can reach;
 * the kernel has dropped what did not come from a sandbox's own address, so a source address names the sandbox.
 */
import type { NameRule } from './policy.ts';

export interface SandboxNames {
  /** Of a name that no rule speaks of. */
  readonly default: 'deny' | 'allow';
  readonly rules: readonly NameRule[];
}

export interface OpenedAddresses {
  /** The sandbox (its record's id) with this address. Text, IPv4 or IPv6; undefined: none, nothing is answered. */
  sandboxAt(address: string): string | undefined;
  /** The names of its policy as it is now; the same object until the policy changes. Undefined: it has gone. */
  namesOf(sandbox: string): SandboxNames | undefined;
  /**
   * Opens what a name led to, for the ports and protocols of the rule for this name, for so many seconds (at least one). It holds for new
   * connections; those under way go on while the policy has the rule. Synchronous: when it returns, the kernel knows.
   *
   * @param name The name asked for, lower case, not what its CNAMEs led to.
   * @returns Those of `addresses` that may be answered. Others stay closed: the node's closed ranges, and what the policy denies by address.
   *   What is private without `inside` the resolver leaves out before. When the policy's default is `allow` nothing has to be opened.
   */
  open(sandbox: string, name: string, addresses: readonly string[], ttlSeconds: number): readonly string[];
}
