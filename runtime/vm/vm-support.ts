/** Whether sandboxes can be virtual machines on this node, and what they run on: for `dsec doctor`, and for what an edge tells of itself. */
import { existsSync } from 'node:fs';
import { findAgent } from '../backend/agent-binary.ts';
import { findGuestKernel } from './guest/guest-kernel.ts';
import { findQemu, onPath } from './qemu/accelerator.ts';
import { chooseVmDriver, knownVmDriver, sandboxVmDriver } from './vm-drivers.ts';

export interface MicrovmSupport {
  /** Why not. */
  readonly problem?: string;
  readonly hint?: string;
  readonly driver?: string;
  /** The reason for this one. */
  readonly why?: string;
  readonly accelerator?: 'kvm' | 'tcg';
  /** Version of the guests' kernel. */
  readonly kernel?: string;
  /** Their network policies need it. */
  readonly tap?: boolean;
}

/** Why there can be no full machines here; undefined: there can. Their kernel is on their disk. */
export function fullVmProblem(): string | undefined {
  if (findQemu() === undefined) return 'qemu-system-x86_64 is not installed';
  if (findAgent() === undefined) return 'dsec-agent is not built';
  return onPath('qemu-img') === undefined ? 'qemu-img is not installed' : undefined;
}

/** @param probe Find out which driver it is and whether KVM works, too: that takes a moment, in which this process does nothing else. */
export function microvmSupport(stateDir: string, { probe = true }: { readonly probe?: boolean } = {}): MicrovmSupport {
  const hasQemu = findQemu() !== undefined;
  // Without QEMU all depends on the other one.
  const choice = probe || !hasQemu ? chooseVmDriver() : knownVmDriver();
  if (choice?.name === 'qemu' && !hasQemu) {
    return {
      problem: 'qemu-system-x86_64 is not installed',
      hint: 'apt-get install --no-install-recommends qemu-system-x86',
    };
  }
  const kernel = findGuestKernel(stateDir);
  if (kernel === undefined) return { problem: 'there is no kernel for guests', hint: '`dsec vm kernel` fetches one' };
  if (findAgent() === undefined) return { problem: 'dsec-agent is not built', hint: 'install rustc, then `npm start`' };
  const driver = probe ? sandboxVmDriver() : undefined;
  return {
    driver: driver?.name,
    why: choice?.why,
    accelerator: driver?.features.accelerator,
    kernel: kernel.version,
    tap: existsSync('/dev/net/tun'),
  };
}
