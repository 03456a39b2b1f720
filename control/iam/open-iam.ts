/** IAM over a database: what iam.ts promises, put together. */
import { randomBytes } from 'node:crypto';
import { fail } from '../errors.ts';
import type { Action } from './actions.ts';
import type { Context } from './administer.ts';
import type { Administration, AuditQuery } from './administration.ts';
import { insertAudit, readAudit } from './audit.ts';
import { Authorities } from './authorities.ts';
import { allows } from './authority.ts';
import type { Database } from './database/database.ts';
import { migrate } from './database/migrate.ts';
import { openPostgres } from './database/postgres.ts';
import { openSqlite } from './database/sqlite.ts';
import type { AuditEntry, Iam, Identity, Reservation, ReserveRequest, ResourceAmounts, Roster } from './iam.ts';
import { Ledger } from './ledger.ts';
import { createPolicy, listPolicies, removePolicy } from './policies.ts';
import { insertPolicy, policiesWhere } from './policy-rows.ts';
import { createPrincipal, disablePrincipal, listPrincipals } from './principals.ts';
import { checkPath, ROOT } from './project-path.ts';
import { createProject, listProjects, removeProject } from './projects.ts';
import { auditSums, getQuota, listQuotas, setQuota } from './quotas.ts';
import { createToken, insertToken, listTokens, revokeToken } from './tokens.ts';

export interface IamOptions {
  /** A path, `sqlite:PATH`, or `postgres://USER@HOST/DATABASE`. */
  readonly database: string;
  readonly now?: () => number;
  /** How far the clock of an edge may be ahead of this one: 2 s. */
  readonly clockSkewMs?: number;
  /** How long a create may be on its way to an edge: 60 s. */
  readonly askingGraceMs?: number;
}

const SWEEP_MS = 10 * 60_000;
const MOST_AUDIT_RECORDS = 1000;

/**
 * Brings the database to this version's form first.
 * @throws IAM_DATABASE_NEWER, IAM_DATABASE, IAM_NO_SQLITE
 */
export async function openIam(options: IamOptions): Promise<OpenIam> {
  const { database: name, now = Date.now } = options;
  const isPostgres = /^postgres(ql)?:/.test(name);
  const database = isPostgres ? await openPostgres(name) : await openSqlite(name.replace(/^sqlite:/, ''));
  try {
    await migrate(database, isPostgres ? 'postgres' : 'sqlite', isPostgres ? 'the PostgreSQL database' : name);
    await database.change(async ({ run }) => {
      await run(
        "INSERT INTO iam_projects (path, parent, created_at, created_by) VALUES (?, NULL, ?, 'dsec') ON CONFLICT DO NOTHING",
        ROOT,
        now(),
      );
    });
    return new OpenIam(database, options);
  } catch (error) {
    await database.close();
    throw error;
  }
}

/**
 * The first token of all: of principal `admin`, role admin on `root`, without an end. Where there is a principal already, undefined.
 * With `anew`, a further one all the same: for whoever holds the machine and has lost his.
 */
export function bootstrapAdmin(iam: OpenIam, options: { anew?: boolean } = {}): Promise<string | undefined> {
  return iam.bootstrap(options.anew ?? false);
}

/** The functions of administration, without the context that they take first. */
type Bound = { [K in keyof Administration]: Administration[K] };

export class OpenIam implements Iam {
  readonly #database: Database;
  readonly #now: () => number;
  readonly #authorities: Authorities;
  readonly #ledger: Ledger;
  readonly #context: Context;

  constructor(database: Database, { now = Date.now, clockSkewMs = 2000, askingGraceMs = 60_000 }: IamOptions) {
    this.#database = database;
    this.#now = now;
    this.#authorities = new Authorities(database, now);
    this.#ledger = new Ledger(database, { now, clockSkewMs, askingGraceMs });
    this.#context = { database, authorities: this.#authorities, now };
  }

  async authenticate(token: string): Promise<Identity> {
    return (await this.#authorities.ofToken(token)).identity;
  }

  async authorize(identity: Identity, action: Action, project: string): Promise<void> {
    const authority = await this.#authorities.of(identity);
    if (!allows(authority, action, project, this.#now())) {
      throw fail('IAM_DENIED', { principal: identity.principal, action, project });
    }
  }

  async scope(identity: Identity, action: Action): Promise<(project: string) => boolean> {
    const authority = await this.#authorities.of(identity);
    const now = this.#now();
    const known = new Map<string, boolean>();
    return (project) => {
      let allowed = known.get(project);
      if (allowed === undefined) {
        allowed = allows(authority, action, project, now);
        known.set(project, allowed);
      }
      return allowed;
    };
  }

  reserve(request: ReserveRequest): Promise<Reservation> {
    return this.#ledger.reserve(request);
  }

  asking(reservationId: string, edge: string): Promise<void> {
    return this.#ledger.asking(reservationId, edge);
  }

  placed(reservationId: string, edge: string, sandbox: string): Promise<void> {
    return this.#ledger.placed(reservationId, edge, sandbox);
  }

  release(reservationId: string): Promise<void> {
    return this.#ledger.release(reservationId);
  }

  resize(reservationId: string, amounts: Partial<ResourceAmounts>, inUse?: boolean): Promise<void> {
    return this.#ledger.resize(reservationId, amounts, inUse);
  }

  reconcile(edge: string, roster: Roster): Promise<string[]> {
    return this.#ledger.reconcile(edge, roster);
  }

  amountsOn(edge: string): Promise<ReadonlyMap<string, ResourceAmounts>> {
    return this.#ledger.amountsOn(edge);
  }

  uncounted(edge: string, reservationIds: readonly string[]): Promise<string[]> {
    return this.#ledger.uncounted(edge, reservationIds);
  }

  sweep(olderThanMs = SWEEP_MS): Promise<number> {
    return this.#ledger.sweep(olderThanMs);
  }

  audit(entry: AuditEntry): Promise<void> {
    return this.#ledger.audit(entry);
  }

  async close(): Promise<void> {
    await this.#ledger.idle();
    await this.#database.close();
  }

  createProject: Bound['createProject'] = async (...asked) => createProject(this.#context, ...asked);
  listProjects: Bound['listProjects'] = async (...asked) => listProjects(this.#context, ...asked);
  removeProject: Bound['removeProject'] = async (...asked) => removeProject(this.#context, ...asked);
  createPrincipal: Bound['createPrincipal'] = async (...asked) => createPrincipal(this.#context, ...asked);
  listPrincipals: Bound['listPrincipals'] = async (...asked) => listPrincipals(this.#context, ...asked);
  disablePrincipal: Bound['disablePrincipal'] = async (...asked) => disablePrincipal(this.#context, ...asked);
  createPolicy: Bound['createPolicy'] = async (...asked) => createPolicy(this.#context, ...asked);
  listPolicies: Bound['listPolicies'] = async (...asked) => listPolicies(this.#context, ...asked);
  removePolicy: Bound['removePolicy'] = async (...asked) => removePolicy(this.#context, ...asked);
  createToken: Bound['createToken'] = async (...asked) => createToken(this.#context, ...asked);
  listTokens: Bound['listTokens'] = async (...asked) => listTokens(this.#context, ...asked);
  revokeToken: Bound['revokeToken'] = async (...asked) => revokeToken(this.#context, ...asked);
  setQuota: Bound['setQuota'] = async (...asked) => setQuota(this.#context, ...asked);
  getQuota: Bound['getQuota'] = async (...asked) => getQuota(this.#context, ...asked);
  listQuotas: Bound['listQuotas'] = async (...asked) => listQuotas(this.#context, ...asked);

  async readAudit(by: Identity, query: AuditQuery) {
    checkPath(query.project);
    await this.authorize(by, 'audit.read', query.project);
    return readAudit(this.#database, { ...query, limit: Math.min(query.limit ?? 100, MOST_AUDIT_RECORDS) });
  }

  async whoAmI(by: Identity) {
    const { identity } = await this.#authorities.of(by);
    const read = this.#database.read.bind(this.#database);
    return { identity, policies: await policiesWhere(read, 'principal = ?', [identity.principal]) };
  }

  /** What is kept as sums is held against what it is the sum of. Empty when all is well, as it must be. */
  async doubts(): Promise<string[]> {
    return this.#database.changeAlone(({ rows }) => auditSums(rows));
  }

  /** See `bootstrapAdmin`. */
  async bootstrap(anew: boolean): Promise<string | undefined> {
    const now = this.#now();
    const secret = await this.#database.changeAlone(async (transaction) => {
      const { rows, run } = transaction;
      const there = await rows('SELECT name FROM iam_principals LIMIT 1');
      if (there.length > 0 && !anew) return undefined;
      await run(
        `INSERT INTO iam_principals (name, kind, project, created_at, created_by) VALUES ('admin', 'user', ?, ?, 'dsec')
         ON CONFLICT (name) DO UPDATE SET disabled = 0`,
        ROOT,
        now,
      );
      const common = { principal: 'admin', project: ROOT, grants: '["admin"]', expires_at: null, created_at: now };
      const id = randomBytes(9).toString('hex');
      await insertPolicy(transaction, { ...common, id: `p${id}`, granted_by: 'dsec' });
      const token = await insertToken(transaction, {
        ...common,
        id: `t${id}`,
        note: there.length === 0 ? 'made at the first start' : 'made by a later start, for whoever had none',
        created_by: 'dsec',
        revoked_at: null,
      });
      const entry = {
        principal: 'dsec',
        action: 'token.create',
        project: ROOT,
        target: `t${id}`,
        outcome: 'done',
      } as const;
      await insertAudit(transaction, [entry], now);
      return token;
    });
    this.#authorities.forget();
    return secret;
  }
}
