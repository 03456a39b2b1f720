/**
 * A sandbox's id as clients know it: `NAME.EDGE`, split at the last dot, since edge ids hold none. It says where the sandbox is, so any
 * apiserver finds it without asking anybody.
 */
import { fail } from '../errors.ts';

export interface SandboxAddress {
  readonly name: string;
  readonly edge: string;
}

const EDGE = /^[a-z0-9-]{1,40}$/;
const NAME = /^[a-z0-9][a-z0-9_.-]{0,62}$/;

export function sandboxId({ name, edge }: SandboxAddress): string {
  return `${name}.${edge}`;
}

/** @throws SANDBOX_ID */
export function parseSandboxId(id: string): SandboxAddress {
  const dot = id.lastIndexOf('.');
  const address = { name: id.slice(0, Math.max(0, dot)), edge: id.slice(dot + 1) };
  if (dot < 1 || !NAME.test(address.name) || !EDGE.test(address.edge)) {
    throw fail('SANDBOX_ID', { id: id.slice(0, 120) });
  }
  return address;
}
