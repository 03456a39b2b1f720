/** Tokens: made once, told once, kept as a hash. */
import { randomBytes } from 'node:crypto';
import { fail } from '../errors.ts';
import { ACTIONS, actionsOf } from './actions.ts';
import { administer, type Context, endOfGrant } from './administer.ts';
import type { MadeToken, Token } from './administration.ts';
import { allows } from './authority.ts';
import { checkName, checkText } from './checked-text.ts';
import type { Transaction } from './database/database.ts';
import type { Identity } from './iam.ts';
import { checkGrants } from './policies.ts';
import { needPrincipal } from './principals.ts';
import { checkPath, ROOT, within, withinSql } from './project-path.ts';
import { needProject } from './projects.ts';
import { makeToken, tokenHash } from './token-text.ts';

export interface TokenRow {
  id: string;
  principal: string;
  project: string;
  grants: string;
  note: string | null;
  expires_at: number | null;
  created_at: number;
  created_by: string;
  revoked_at: number | null;
}

const COLUMNS = 'id, principal, project, grants, note, expires_at, created_at, created_by, revoked_at';

export function createToken(
  context: Context,
  by: Identity,
  asked: { principal?: string; project?: string; grants?: readonly string[]; expiresAtMs?: number; note?: string },
): Promise<MadeToken> {
  const { principal = by.principal, project = by.project } = asked;
  checkName('name of a principal', principal);
  checkPath(project);
  if (asked.note !== undefined) checkText('note', asked.note);
  if (asked.grants !== undefined) checkGrants(asked.grants);
  const entry = { action: 'token.create', project, detail: { principal } };
  return administer(context, by, entry, async (change) => {
    const { rows, needs, now } = change;
    needs('token.admin', project);
    const grants = asked.grants ?? ACTIONS.filter((action) => allows(change.by, action, project, now));
    const expiresAt = endOfGrant(change, actionsOf(grants), project, asked.expiresAtMs);
    await needProject(rows, project);
    const { project: home, disabled } = await needPrincipal(rows, principal);
    if (principal !== by.principal) needs('token.admin', home);
    if (disabled) throw fail('IAM_BAD_REQUEST', { problem: `principal ${principal} is disabled` });
    const row: TokenRow = {
      id: `t${randomBytes(9).toString('hex')}`,
      principal,
      project,
      grants: JSON.stringify(grants),
      note: asked.note ?? null,
      expires_at: expiresAt,
      created_at: now,
      created_by: by.principal,
      revoked_at: null,
    };
    const secret = await insertToken(change, row);
    return { result: { ...tokenOf(row), secret }, target: row.id };
  });
}

/** @returns the secret */
export async function insertToken({ run }: Pick<Transaction, 'run'>, row: TokenRow): Promise<string> {
  const secret = makeToken();
  await run(
    `INSERT INTO iam_tokens (hash, ${COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
    tokenHash(secret),
    row.id,
    row.principal,
    row.project,
    row.grants,
    row.note,
    row.expires_at,
    row.created_at,
    row.created_by,
    row.revoked_at,
  );
  return secret;
}

export async function listTokens(
  context: Context,
  by: Identity,
  { project = ROOT, principal, ended = false }: { project?: string; principal?: string; ended?: boolean } = {},
): Promise<Token[]> {
  checkPath(project);
  const authority = await context.authorities.of(by);
  const conditions = [withinSql('project')];
  const values: string[] = within(project);
  if (principal !== undefined) {
    conditions.push('principal = ?');
    values.push(principal);
  }
  const found = await context.database.read<TokenRow>(
    `SELECT ${COLUMNS} FROM iam_tokens WHERE ${conditions.join(' AND ')} ORDER BY created_at, id`,
    ...values,
  );
  const now = context.now();
  return found
    .filter((row) => row.principal === by.principal || allows(authority, 'token.admin', row.project, now))
    .filter((row) => ended || (row.revoked_at === null && (row.expires_at ?? Number.POSITIVE_INFINITY) > now))
    .map(tokenOf);
}

export function revokeToken(context: Context, by: Identity, id: string): Promise<Token> {
  checkName('id of a token', id);
  const entry = { action: 'token.revoke', project: by.project, target: id };
  return administer(context, by, entry, async ({ rows, run, needs, now }) => {
    const [row] = await rows<TokenRow>(`SELECT ${COLUMNS} FROM iam_tokens WHERE id = ?`, id);
    if (row?.principal !== by.principal) needs('token.admin', row?.project ?? ROOT);
    if (row === undefined) throw fail('IAM_NOT_FOUND', { what: `token ${id}` });
    const revokedAt = row.revoked_at ?? now;
    await run('UPDATE iam_tokens SET revoked_at = ? WHERE id = ?', revokedAt, id);
    return { result: tokenOf({ ...row, revoked_at: revokedAt }) };
  });
}

function tokenOf(row: TokenRow): Token {
  const grants = JSON.parse(row.grants) as string[];
  return {
    id: row.id,
    principal: row.principal,
    project: row.project,
    grants,
    actions: [...actionsOf(grants)],
    note: row.note ?? undefined,
    expiresAtMs: row.expires_at ?? undefined,
    createdAtMs: row.created_at,
    createdBy: row.created_by,
    revokedAtMs: row.revoked_at ?? undefined,
  };
}
