/**
 * What a backend can do beyond running one command. Every operation of a sandbox exists for every backend; one that a backend lacks
 * fails with RUNTIME_UNSUPPORTED, which names both, before anything is done.
 */
import { DsecError, isDsecError } from '#base';
import { fail, runtimeErrors } from '../errors.ts';

export const CAPABILITIES = [
  /** Sandboxes that stay: create, find, stop, remove. */
  'resident',
  /** Code in, results out, nothing stays: FnCall. */
  'tasks',
  /** A workspace and toolkits over its image. */
  'composition',
  /** Environment, user and folder of its commands. */
  'environment',
  'exec',
  /** Commands on a terminal. */
  'terminal',
  /** Shell sessions. */
  'sessions',
  'files',
  /** Changes below a folder, as they happen. */
  'watch',
  /** Connections to ports inside. */
  'ports',
  /** Commands that stand still, and give their memory back. */
  'pause',
  /** Sandboxes that go on from where it is. */
  'fork',
  /** With its memory, too: what runs in it goes on in each. */
  'fork-memory',
  /** An image of its changes while it runs. */
  'pack-diff',
  /** Best effort beside latency-sensitive. */
  'classes',
  'cpu-limit',
  'memory-limit',
  'pids-limit',
  'io-limit',
  'disk-limit',
  /** Limits that are changed while it runs. */
  'update',
  /** What it uses. */
  'usage',
  /** A network with rules on what it may reach. */
  'network-policy',
  /** All that the machine can reach. */
  'host-network',
  /** Pictures of a screen, a keyboard, a mouse. */
  'screen',
  /** A serial console. */
  'console',
  /** Text that is copied and pasted through the screen. */
  'clipboard',
] as const;

export type Capability = (typeof CAPABILITIES)[number];

export interface Capable {
  /** Of the backend. */
  readonly name: string;
  readonly features: ReadonlySet<Capability>;
}

/** How a creation asks for it, where its name does not say it. */
const ASKED_BY: Readonly<Partial<Record<Capability, string>>> = {
  'cpu-limit': '--cpus',
  'memory-limit': '--memory',
  'pids-limit': '--pids',
  'io-limit': '--io-read-bps, --io-write-bps, --io-read-iops, --io-write-iops',
  'disk-limit': '--disk, --inodes',
};

export function unsupported(backend: string, capability: string): DsecError {
  const options = ASKED_BY[capability as Capability];
  if (options === undefined) return fail('RUNTIME_UNSUPPORTED', { backend, capability });
  const row = {
    ...runtimeErrors.RUNTIME_UNSUPPORTED,
    message: `${runtimeErrors.RUNTIME_UNSUPPORTED.message} (${options})`,
  };
  return new DsecError('RUNTIME_UNSUPPORTED', row, { backend, capability });
}

/** It hangs on an agent in the guest, which is not there yet, or never. */
export function unsupportedWithoutAgent(backend: string, capability: Capability): DsecError {
  const row = {
    ...runtimeErrors.RUNTIME_UNSUPPORTED,
    message: 'backend {backend} has no {capability} here: no guest agent answers in the machine yet',
    hint: 'wait until its system is up; one without an agent (qemu-guest-agent, spice-vdagent) never has that: docs/vm.md',
  };
  return new DsecError('RUNTIME_UNSUPPORTED', row, { backend, capability });
}

/** @throws RUNTIME_UNSUPPORTED */
export function needs(backend: Capable, capability: Capability): void {
  if (!backend.features.has(capability)) throw unsupported(backend.name, capability);
}

/** What `needs` throws; `params` has `backend` and `capability`. */
export function isUnsupported(error: unknown): error is DsecError {
  return isDsecError(error, 'RUNTIME_UNSUPPORTED');
}
