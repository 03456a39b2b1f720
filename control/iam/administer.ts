/**
 * What every change of an administrator has in common: his rights are read inside the transaction that makes the change, whoever else
 * changes them waits; it is in the audit log when it is done, and when it was denied; afterwards nothing old is believed.
 */
import { isDsecError } from '#base';
import { fail } from '../errors.ts';
import type { Action } from './actions.ts';
import { insertAudit } from './audit.ts';
import type { Authorities } from './authorities.ts';
import { type Authority, allowedUntil, loadAuthority } from './authority.ts';
import type { Database, Transaction } from './database/database.ts';
import type { AuditEntry, Identity } from './iam.ts';

export interface Context {
  readonly database: Database;
  readonly authorities: Authorities;
  readonly now: () => number;
}

export interface Change extends Transaction {
  readonly by: Authority;
  readonly now: number;
  /** @throws IAM_DENIED */
  needs(action: Action, project: string): void;
}

export type ChangeName = Pick<AuditEntry, 'action' | 'project' | 'target' | 'detail'>;

/** `name`: for the audit log; what `work` returns may complete it. */
export async function administer<T>(
  { database, authorities, now }: Context,
  by: Identity,
  name: ChangeName,
  work: (change: Change) => Promise<{ readonly result: T; readonly target?: string }>,
): Promise<T> {
  const entry = (outcome: AuditEntry['outcome'], target = name.target): AuditEntry => {
    return { principal: by.principal, tokenId: by.tokenId, ...name, target, outcome };
  };
  try {
    return await database.changeAlone(async (transaction) => {
      const at = now();
      const authority = await loadAuthority(transaction.rows, { tokenId: by.tokenId }, at);
      if (authority === undefined) throw fail('IAM_TOKEN_INVALID');
      const needs = (action: Action, project: string) => {
        if (allowedUntil(authority, action, project, at) === undefined) {
          throw fail('IAM_DENIED', { principal: by.principal, action, project });
        }
      };
      const { result, target } = await work({ ...transaction, by: authority, now: at, needs });
      await insertAudit(transaction, [entry('done', target)], at);
      return result;
    });
  } catch (error) {
    if (isDsecError(error, 'IAM_DENIED') || isDsecError(error, 'IAM_BEYOND')) {
      await database.change((transaction) => insertAudit(transaction, [entry('denied')], now()));
    }
    throw error;
  } finally {
    authorities.forget();
  }
}

/**
 * Until when the caller may give all of `actions` on `project`: no later than he has them. null and infinity: without an end; undefined: as long as he can.
 * @throws IAM_BEYOND
 */
export function endOfGrant(
  { by, now }: Pick<Change, 'by' | 'now'>,
  actions: ReadonlySet<Action>,
  project: string,
  askedMs: number | undefined,
): number | null {
  const { principal } = by.identity;
  let end = Number.POSITIVE_INFINITY;
  for (const action of actions) {
    const until = allowedUntil(by, action, project, now);
    if (until === undefined) throw fail('IAM_BEYOND', { principal, action, project, why: 'he may not do it' });
    if (askedMs !== undefined && askedMs > until) {
      const why = `he may do it until ${new Date(until).toISOString()} only`;
      throw fail('IAM_BEYOND', { principal, action, project, why });
    }
    end = Math.min(end, until);
  }
  if (askedMs !== undefined && askedMs !== Number.POSITIVE_INFINITY) {
    if (!Number.isSafeInteger(askedMs) || askedMs <= now || askedMs > 8.64e15) {
      throw fail('IAM_BAD_REQUEST', { problem: `expiresAtMs ${askedMs}: not a time to come, in milliseconds` });
    }
    return askedMs;
  }
  return end === Number.POSITIVE_INFINITY ? null : end;
}
