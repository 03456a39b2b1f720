/**
 * Which backend runs a sandbox: our own launcher where it is built, else crun, else runc; or the one that is asked for. And the
 * backend that a record names, whatever would be chosen today.
 */

import { fail } from '../errors.ts';
import { MICROVM, vmBackend } from '../vm/vm-backend.ts';
import { findAgent } from './agent-binary.ts';
import type { Backend } from './backend.ts';
import { findOciRuntime, openOciBackend } from './oci-runtime.ts';
import { OWN_BACKEND, openOwnBackend } from './own-backend.ts';

export const RUNTIME_NAMES = ['dsec', 'crun', 'runc'] as const;
export type RuntimeName = (typeof RUNTIME_NAMES)[number];

/** @param asked By the caller, else by $DSEC_OCI_RUNTIME. @throws RUNTIME_NO_LAUNCHER, RUNTIME_NO_OCI_RUNTIME */
export function chooseBackend(runDir: string, asked: string | undefined = process.env.DSEC_OCI_RUNTIME): Backend {
  const agent = asked === undefined || asked === '' || asked === OWN_BACKEND ? findAgent() : undefined;
  if (agent !== undefined) return openOwnBackend(agent);
  if (asked === OWN_BACKEND) throw fail('RUNTIME_NO_LAUNCHER');
  return openOciBackend(runDir, findOciRuntime(asked));
}

/** A full virtual machine has nothing here but, perhaps, control groups; its process is its driver's to end. */
const FULL_VM = 'vm';

/** To end what it runs, and what it left. @throws RUNTIME_NO_OCI_RUNTIME */
export function backendNamed(name: string, runDir: string): Backend {
  if (name === MICROVM) return vmBackend(runDir);
  return name === OWN_BACKEND || name === FULL_VM
    ? openOwnBackend(undefined)
    : openOciBackend(runDir, findOciRuntime(name));
}
