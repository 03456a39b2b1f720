/** What of its machine a sandbox would share, beyond what every sandbox does: whoever asks for that needs an action of its own. */
import type { FastifyRequest } from 'fastify';
import type { Identity } from '../iam/iam.ts';
import type { Access } from './access.ts';

export interface Isolation {
  readonly network?: { readonly mode?: string };
  readonly userns?: string;
}

export function sharesHost({ network, userns }: Isolation): boolean {
  return network?.mode === 'host' || userns === 'host';
}

/** @throws IAM_DENIED */
export async function allowHostShared(
  access: Access,
  { identity, requestId }: { readonly identity: Identity; readonly requestId: string },
  asked: Isolation,
  project: string,
): Promise<void> {
  if (sharesHost(asked)) await access.allowed(identity, 'sandbox.host', project, requestId);
}

export function askerOf({ identity, id: requestId }: FastifyRequest) {
  return { identity, requestId };
}
