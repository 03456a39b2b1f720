/**
 * What a token may do right now, and until when: its own scope and the policies of its principal. Pure, so that `authorize`, the rule
 * that nobody gives what he does not have, and lists all decide by the same lines.
 */
import { type Action, actionsOf } from './actions.ts';
import type { Transaction } from './database/database.ts';
import type { Identity, PrincipalKind } from './iam.ts';
import { isWithin } from './project-path.ts';

export interface HeldPolicy {
  readonly project: string;
  readonly actions: ReadonlySet<Action>;
  readonly expiresAtMs: number;
}

export interface Authority {
  readonly identity: Identity;
  readonly policies: readonly HeldPolicy[];
}

interface TokenRow {
  id: string;
  principal: string;
  kind: PrincipalKind;
  project: string;
  grants: string;
  expires_at: number | null;
}

/** Undefined when the token is unknown, revoked or expired, or its principal disabled. */
export async function loadAuthority(
  rows: Transaction['rows'],
  by: { readonly hash: string } | { readonly tokenId: string },
  now: number,
): Promise<Authority | undefined> {
  const column = 'hash' in by ? 'hash' : 'id';
  const [token] = await rows<TokenRow>(
    `SELECT t.id, t.principal, p.kind, t.project, t.grants, t.expires_at FROM iam_tokens t JOIN iam_principals p ON p.name = t.principal
     WHERE t.${column} = ? AND t.revoked_at IS NULL AND p.disabled = 0`,
    'hash' in by ? by.hash : by.tokenId,
  );
  if (token === undefined || (token.expires_at !== null && token.expires_at <= now)) return undefined;
  const policies = await rows<{ project: string; grants: string; expires_at: number | null }>(
    'SELECT project, grants, expires_at FROM iam_policies WHERE principal = ?',
    token.principal,
  );
  return {
    identity: {
      principal: token.principal,
      kind: token.kind,
      project: token.project,
      tokenId: token.id,
      actions: actionsOf(JSON.parse(token.grants) as string[]),
      expiresAtMs: token.expires_at ?? undefined,
    },
    policies: policies.map(({ project, grants, expires_at }) => ({
      project,
      actions: actionsOf(JSON.parse(grants) as string[]),
      expiresAtMs: expires_at ?? Number.POSITIVE_INFINITY,
    })),
  };
}

/** Until when `action` may be done on `project`: infinity without an end, undefined when it may not be done. */
export function allowedUntil(
  { identity, policies }: Authority,
  action: Action,
  project: string,
  now: number,
): number | undefined {
  const tokenEnd = identity.expiresAtMs ?? Number.POSITIVE_INFINITY;
  if (tokenEnd <= now || !identity.actions.has(action) || !isWithin(project, identity.project)) return undefined;
  let end = 0;
  for (const policy of policies) {
    if (policy.actions.has(action) && isWithin(project, policy.project)) end = Math.max(end, policy.expiresAtMs);
  }
  return end > now ? Math.min(end, tokenEnd) : undefined;
}

export function allows(authority: Authority, action: Action, project: string, now: number): boolean {
  return allowedUntil(authority, action, project, now) !== undefined;
}
