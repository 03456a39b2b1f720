/**
 * What a backend can do beyond running one command. Every operation of a sandbox exists for every backend; one that a backend lacks
 * fails with RUNTIME_UNSUPPORTED, which names both, before anything is done.
 */
import { type DsecError, isDsecError } from '#base';
import { fail } from '../errors.ts';

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

export function unsupported(backend: string, capability: string): DsecError {
  return fail('RUNTIME_UNSUPPORTED', { backend, capability });
}

/** @throws RUNTIME_UNSUPPORTED */
export function needs(backend: Capable, capability: Capability): void {
  if (!backend.features.has(capability)) throw fail('RUNTIME_UNSUPPORTED', { backend: backend.name, capability });
}

/** What `needs` throws; `params` has `backend` and `capability`. */
export function isUnsupported(error: unknown): error is DsecError {
  return isDsecError(error, 'RUNTIME_UNSUPPORTED');
}
