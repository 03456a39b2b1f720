/** Network attempts that were denied, over all sandboxes that a caller may read. The edges have them; they are asked, a few at once. */
import type { Identity } from '../iam/iam.ts';
import type { ApiParts } from './api-parts.ts';
import type { SandboxFilter } from './request-schemas.ts';
import { listSandboxes } from './sandbox-list.ts';

export interface Denied {
  readonly sandbox: string;
  readonly project?: string;
  readonly time?: string;
  readonly [field: string]: unknown;
}

const MOST_SANDBOXES = 1000;
const MOST_EACH = 100;
const AT_ONCE = 16;

export async function deniedAttempts(
  { edges, access }: ApiParts,
  identity: Identity,
  filter: SandboxFilter,
  signal: AbortSignal,
): Promise<{
  readonly denied: readonly Denied[];
  readonly unreachable: readonly string[];
  /** There are more sandboxes than were asked. */
  readonly truncated?: boolean;
}> {
  const limit = Math.min(filter.limit ?? MOST_SANDBOXES, MOST_SANDBOXES);
  const {
    sandboxes,
    unreachable,
    continue: more,
  } = await listSandboxes(edges, access, identity, { ...filter, limit }, signal);
  const left = [...sandboxes];
  const denied: Denied[] = [];
  const worker = async () => {
    for (let view = left.pop(); view !== undefined; view = left.pop()) {
      const { id, name, edge, project } = view;
      const path = `/v1/sandboxes/${encodeURIComponent(name)}/network/denied?limit=${MOST_EACH}`;
      try {
        const attempts = await edges.ask<object[]>(edge, { method: 'GET', path, signal, timeoutMs: 10_000 });
        for (const attempt of attempts) denied.push({ sandbox: id, project, ...attempt });
      } catch {
        // It has ended meanwhile, or has no policy.
        if (signal.aborted) return;
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  denied.sort((a, b) => String(b.time).localeCompare(String(a.time)));
  return { denied, unreachable, ...(more === undefined ? {} : { truncated: true }) };
}
