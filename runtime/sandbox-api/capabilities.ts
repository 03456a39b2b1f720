/**
 * What a backend can do beyond running one command. Every operation of a sandbox exists for every backend; one that a backend lacks
 * fails with RUNTIME_UNSUPPORTED, which names both, before anything is done.
 */
import { type DsecError, isDsecError } from '#base';
import { fail } from '../errors.ts';

export const CAPABILITIES = [
  /** Sandboxes that stay: create, exec, files, stop. */
  'resident',
  /** Commands on a terminal. */
  'terminal',
  /** Shell sessions. */
  'sessions',
  'files',
  'memory-limit',
  'pids-limit',
] as const;

export type Capability = (typeof CAPABILITIES)[number];

export interface Capable {
  /** Of the backend. */
  readonly name: string;
  readonly features: ReadonlySet<Capability>;
}

/** @throws RUNTIME_UNSUPPORTED */
export function needs(backend: Capable, capability: Capability): void {
  if (!backend.features.has(capability)) throw fail('RUNTIME_UNSUPPORTED', { backend: backend.name, capability });
}

/** What `needs` throws; `params` has `backend` and `capability`. */
export function isUnsupported(error: unknown): error is DsecError {
  return isDsecError(error, 'RUNTIME_UNSUPPORTED');
}
