/** Policies as they lie in the database. */
import { actionsOf } from './actions.ts';
import type { Policy } from './administration.ts';
import type { Transaction } from './database/database.ts';

interface PolicyRow {
  id: string;
  principal: string;
  project: string;
  grants: string;
  expires_at: number | null;
  created_at: number;
  granted_by: string;
}

const COLUMNS = 'id, principal, project, grants, expires_at, created_at, granted_by';

export async function insertPolicy({ run }: Pick<Transaction, 'run'>, row: PolicyRow): Promise<void> {
  await run(
    `INSERT INTO iam_policies (${COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)`,
    row.id,
    row.principal,
    row.project,
    row.grants,
    row.expires_at,
    row.created_at,
    row.granted_by,
  );
}

export async function policiesWhere(
  rows: Transaction['rows'],
  condition: string,
  values: readonly string[],
): Promise<Policy[]> {
  const found = await rows<PolicyRow>(
    `SELECT ${COLUMNS} FROM iam_policies WHERE ${condition} ORDER BY project, principal, id`,
    ...values,
  );
  return found.map(policyOf);
}

export function policyOf(row: PolicyRow): Policy {
  const grants = JSON.parse(row.grants) as string[];
  return {
    id: row.id,
    principal: row.principal,
    project: row.project,
    grants,
    actions: [...actionsOf(grants)],
    expiresAtMs: row.expires_at ?? undefined,
    createdAtMs: row.created_at,
    grantedBy: row.granted_by,
  };
}
