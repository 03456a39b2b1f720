/** The audit log: appended to, never changed (the database refuses it), and no secret in it. */
import type { AuditQuery, AuditRecord } from './administration.ts';
import type { Columns, Database, Transaction, Value } from './database/database.ts';
import type { AuditEntry } from './iam.ts';
import { within, withinSql } from './project-path.ts';
import { withoutTokens } from './token-text.ts';

const LONGEST = 4096;

interface AuditRow {
  id: number;
  at: number;
  principal: string;
  token_id: string | null;
  action: string;
  project: string;
  target: string | null;
  outcome: string;
  request_id: string | null;
  detail: string | null;
}

const ENTRY: Columns = {
  at: 'BIGINT',
  principal: 'TEXT',
  token_id: 'TEXT',
  action: 'TEXT',
  project: 'TEXT',
  target: 'TEXT',
  outcome: 'TEXT',
  request_id: 'TEXT',
  detail: 'TEXT',
};

export async function insertAudit(
  transaction: Transaction,
  entries: readonly AuditEntry[],
  now: number,
): Promise<void> {
  if (entries.length === 0) return;
  const rows = entries.map(({ principal, tokenId, action, project, target, outcome, requestId, detail }): Value[] => [
    now,
    clean(principal),
    clean(tokenId),
    clean(action),
    clean(project),
    clean(target),
    outcome,
    clean(requestId),
    clean(detail === undefined ? undefined : JSON.stringify(detail)),
  ]);
  await transaction.insertMany('iam_audit', ENTRY, rows);
}

/** What any database takes, of a bounded length, without what looks like a token. */
function clean(text: string | undefined): string | null {
  if (text === undefined) return null;
  return withoutTokens(text)
    .slice(0, LONGEST)
    .replace(/\u0000|\p{Surrogate}/gu, '?');
}

export async function readAudit(database: Database, query: AuditQuery): Promise<AuditRecord[]> {
  const conditions = [withinSql('project')];
  const values: (string | number)[] = [...within(query.project)];
  if (query.principal !== undefined) {
    conditions.push('principal = ?');
    values.push(query.principal);
  }
  if (query.action !== undefined) {
    conditions.push('action = ?');
    values.push(query.action);
  }
  if (query.before !== undefined) {
    conditions.push('id < ?');
    values.push(query.before);
  }
  const rows = await database.read<AuditRow>(
    `SELECT id, at, principal, token_id, action, project, target, outcome, request_id, detail FROM iam_audit
     WHERE ${conditions.join(' AND ')} ORDER BY id DESC LIMIT ?`,
    ...values,
    query.limit ?? 100,
  );
  return rows.map((row) => ({
    id: row.id,
    atMs: row.at,
    principal: row.principal,
    tokenId: row.token_id ?? undefined,
    action: row.action,
    project: row.project,
    target: row.target ?? undefined,
    outcome: row.outcome,
    requestId: row.request_id ?? undefined,
    detail: parsed(row.detail),
  }));
}

function parsed(detail: string | null): Readonly<Record<string, unknown>> | undefined {
  if (detail === null) return undefined;
  try {
    return JSON.parse(detail) as Record<string, unknown>;
  } catch {
    // Cut where it was too long.
    return { text: detail };
  }
}
