/**
 * What is in use: reservations, counted for their project and all above it. One group of calls is one transaction with a handful of
 * statements, however many calls it holds (docs/iam.md, "Reservations").
 *
 * Locks are taken in one order by everybody: rows of projects by path, then reservations by id. SQLite has one writer anyway.
 */
import { randomFillSync } from 'node:crypto';
import type { DsecError } from '#base';
import { fail } from '../errors.ts';
import { amountsOf, COLUMNS, checkAmounts, columns, limitsOf, type Row, UNLIMITED } from './amounts.ts';
import { insertAudit } from './audit.ts';
import { checkText } from './checked-text.ts';
import { type Columns, type Database, listOf, type Transaction, type Value } from './database/database.ts';
import { Grouped } from './grouped.ts';
import {
  type AuditEntry,
  RELEASED_KEPT_MS,
  RESOURCES,
  type Reservation,
  type ReserveRequest,
  type Resource,
  type ResourceAmounts,
  type Roster,
} from './iam.ts';
import { chainOf, checkPath } from './project-path.ts';

type Operation =
  | { readonly kind: 'reserve'; readonly request: ReserveRequest }
  | { readonly kind: 'asking'; readonly id: string; readonly edge: string }
  | { readonly kind: 'placed'; readonly id: string; readonly edge: string; readonly sandbox: string }
  | { readonly kind: 'release'; readonly id: string }
  | {
      readonly kind: 'resize';
      readonly id: string;
      readonly amounts: Partial<ResourceAmounts>;
      readonly inUse: boolean;
    }
  | { readonly kind: 'audit'; readonly entry: AuditEntry };
type Of<K extends Operation['kind']> = Extract<Operation, { kind: K }>;
type Result = Reservation | undefined | Error;

interface Account {
  readonly path: string;
  readonly limits: Partial<Record<Resource, number>>;
  readonly used: Record<Resource, number>;
  changed: boolean;
}

interface ReservationRow {
  id: string;
  project: string;
  request_id: string | null;
  placed: number;
  edge: string | null;
  sandbox: string | null;
  /** Of one that is released. */
  ended: number;
}

const counted = (prefix = ''): Columns =>
  Object.fromEntries(RESOURCES.map((resource) => [`${prefix}${COLUMNS[resource]}`, 'BIGINT']));
const RESERVED: Columns = {
  id: 'TEXT',
  project: 'TEXT',
  user_name: 'TEXT',
  request_id: 'TEXT',
  recorded_at: 'BIGINT',
  edge: 'TEXT',
  ...counted(),
};
const RESIZED: Columns = { id: 'TEXT', ...counted() };
const USED: Columns = { path: 'TEXT', ...counted('used_') };
const MARK: Columns = { id: 'TEXT', edge: 'TEXT', sandbox: 'TEXT', recorded_at: 'BIGINT', placed: 'INTEGER' };
/** Of a row that is deleted: what it gives back, and what is remembered of it. */
const GONE = `id, project, request_id, placed, edge, sandbox, ${columns()}`;
const field = (name: string) => `value ->> '${name}'`;

const NONE: ResourceAmounts = { sandboxes: 0, cpuMilli: 0, memoryBytes: 0, diskBytes: 0 };

const FORGET_AT_ONCE = 2000;

export interface LedgerOptions {
  readonly now: () => number;
  readonly clockSkewMs: number;
  readonly askingGraceMs: number;
}

export class Ledger {
  readonly #database: Database;
  readonly #options: LedgerOptions;
  readonly #group: Grouped<Operation, Reservation | undefined>;
  #sweptUntil = '';

  constructor(database: Database, options: LedgerOptions) {
    this.#database = database;
    this.#options = options;
    this.#group = new Grouped((operations) => database.change((transaction) => this.#write(transaction, operations)));
  }

  async reserve(request: ReserveRequest): Promise<Reservation> {
    checkPath(request.project);
    checkText('user', request.user);
    if (request.requestId !== undefined) checkText('requestId', request.requestId, 512);
    if (request.edge !== undefined) checkText('edge', request.edge);
    checkAmounts(request.amounts);
    return (await this.#group.add({ kind: 'reserve', request })) as Reservation;
  }

  async asking(id: string, edge: string): Promise<void> {
    await this.#group.add({ kind: 'asking', id: checkText('reservation', id), edge: checkText('edge', edge) });
  }

  async placed(id: string, edge: string, sandbox: string): Promise<void> {
    checkText('reservation', id);
    checkText('edge', edge);
    await this.#group.add({ kind: 'placed', id, edge, sandbox: checkText('sandbox', sandbox) });
  }

  async release(id: string): Promise<void> {
    await this.#group.add({ kind: 'release', id: checkText('reservation', id) });
  }

  async resize(id: string, amounts: Partial<ResourceAmounts>, inUse = false): Promise<void> {
    checkAmounts({ ...NONE, ...amounts });
    await this.#group.add({ kind: 'resize', id: checkText('reservation', id), amounts, inUse });
  }

  async audit(entry: AuditEntry): Promise<void> {
    await this.#group.add({ kind: 'audit', entry });
  }

  /** As one transaction of its own: whether a reservation is over is decided by what it is while its row is locked. */
  async reconcile(edge: string, roster: Roster): Promise<string[]> {
    const placedBefore = roster.writtenAtMs - this.#options.clockSkewMs;
    const askedBefore = roster.writtenAtMs - this.#options.clockSkewMs - this.#options.askingGraceMs;
    const over = `edge = ? AND ((placed = 1 AND recorded_at < ?) OR (placed = 0 AND recorded_at < ?))
      AND id NOT IN (SELECT ${field('id')} FROM ${this.#database.list})`;
    const values = [edge, placedBefore, askedBefore, listOf(roster.reservations.map((id) => ({ id })))];
    return this.#releaseWhere(over, values);
  }

  async amountsOn(edge: string): Promise<ReadonlyMap<string, ResourceAmounts>> {
    const rows = await this.#database.read<Row>(`SELECT id, ${columns()} FROM iam_reservations WHERE edge = ?`, edge);
    return new Map(rows.map((row) => [String(row.id), amountsOf(row)]));
  }

  async uncounted(edge: string, ids: readonly string[]): Promise<string[]> {
    const rows = await this.#database.read<{ id: string }>(
      `SELECT ${field('id')} AS id FROM ${this.#database.list}
       WHERE ${field('id')} NOT IN (SELECT iam_reservations.id FROM iam_reservations WHERE edge = ?)`,
      listOf(ids.map((id) => ({ id }))),
      edge,
    );
    return rows.map(({ id }) => id);
  }

  /** Ids begin with their time, and none without an edge is left below what was swept before: each is looked at once. */
  async sweep(olderThanMs: number): Promise<number> {
    const until = timeText(this.#options.now() - olderThanMs);
    const released = await this.#releaseWhere('edge IS NULL AND iam_reservations.id >= ? AND iam_reservations.id < ?', [
      this.#sweptUntil,
      until,
    ]);
    if (until > this.#sweptUntil) this.#sweptUntil = until;
    await this.#forget(this.#options.now() - RELEASED_KEPT_MS);
    return released.length;
  }

  /** A few at a time: nobody waits long for it. */
  async #forget(beforeMs: number): Promise<void> {
    const some = `SELECT project, request_id FROM iam_released WHERE released_at < ? LIMIT ${FORGET_AT_ONCE}`;
    const few = (transaction: Transaction) =>
      transaction.run(`DELETE FROM iam_released WHERE (project, request_id) IN (${some})`, beforeMs);
    while ((await this.#database.change(few)) === FORGET_AT_ONCE);
  }

  idle(): Promise<void> {
    return this.#group.idle();
  }

  async #releaseWhere(condition: string, values: (string | number)[]): Promise<string[]> {
    // Most rosters end nothing; only the others are worth a transaction.
    const over = await this.#database.read<{ id: string; project: string }>(
      `SELECT iam_reservations.id, project FROM iam_reservations WHERE ${condition}`,
      ...values,
    );
    if (over.length === 0) return [];
    return this.#database.change(async (transaction) => {
      const accounts = await this.#accounts(transaction, new Set(over.map(({ project }) => project)));
      const gone = await transaction.rows<Row>(
        `DELETE FROM iam_reservations WHERE iam_reservations.id IN (SELECT ${field('id')} FROM ${this.#database.list}) AND ${condition}
         RETURNING ${GONE}`,
        listOf(over.map(({ id }) => ({ id }))),
        ...values,
      );
      for (const row of gone) give(accounts, row);
      await this.#remember(transaction, gone);
      await this.#saveAccounts(transaction, accounts);
      return gone.map(({ id }) => String(id));
    });
  }

  async #write(transaction: Transaction, operations: readonly Operation[]): Promise<Result[]> {
    const results: Result[] = operations.map(() => undefined);
    const byKind = new Map<Operation['kind'], [number, Operation][]>();
    for (let at = 0; at < operations.length; at++) {
      const operation = operations[at] as Operation;
      const before = byKind.get(operation.kind);
      if (before === undefined) byKind.set(operation.kind, [[at, operation]]);
      else before.push([at, operation]);
    }
    const of = <K extends Operation['kind']>(kind: K) => (byKind.get(kind) ?? []) as [number, Of<K>][];
    const releases = of('release').map(([, { id }]) => ({ id }));
    const reserves = of('reserve');
    const resizes = of('resize');

    const changing = [...releases, ...resizes.map(([, { id }]) => ({ id }))];
    const releasing =
      changing.length === 0
        ? []
        : await transaction.rows<{ project: string }>(
            `SELECT project FROM iam_reservations WHERE iam_reservations.id IN (SELECT ${field('id')} FROM ${this.#database.list})`,
            listOf(changing),
          );
    const projects = new Set([
      ...releasing.map(({ project }) => project),
      ...reserves.map(([, { request }]) => request.project),
    ]);
    if (projects.size > 0) {
      const accounts = await this.#accounts(transaction, projects);
      if (releases.length > 0 && releasing.length > 0) {
        const ids = [...new Set(releases.map(({ id }) => id))].sort();
        const gone = await transaction.deleteMany<Row>('iam_reservations', ids, GONE);
        for (const row of gone) give(accounts, row);
        await this.#remember(transaction, gone);
      }
      await this.#resize(transaction, accounts, resizes, results);
      if (reserves.length > 0) await this.#reserve(transaction, accounts, reserves, results);
      await this.#saveAccounts(transaction, accounts);
    } else for (const [i, { id }] of resizes) results[i] = fail('IAM_RESERVATION_GONE', { id });
    await this.#mark(transaction, of('asking'), of('placed'), results);
    await insertAudit(
      transaction,
      of('audit').map(([, { entry }]) => entry),
      this.#options.now(),
    );
    return results;
  }

  /** Those of the chains of `projects` that there are, locked. */
  async #accounts(transaction: Transaction, projects: ReadonlySet<string>): Promise<Map<string, Account>> {
    const paths = new Set([...projects].flatMap(chainOf));
    const rows = await transaction.rows<Row>(
      `SELECT path, ${columns('limit_')}, ${columns('used_')} FROM iam_projects
       WHERE iam_projects.path IN (SELECT ${field('path')} FROM ${this.#database.list}) ORDER BY iam_projects.path ${this.#database.forUpdate}`,
      listOf([...paths].map((path) => ({ path }))),
    );
    return new Map(
      rows.map((row) => {
        const path = String(row.path);
        return [path, { path, limits: limitsOf(row), used: amountsOf(row, 'used_'), changed: false }];
      }),
    );
  }

  async #saveAccounts(transaction: Transaction, accounts: ReadonlyMap<string, Account>): Promise<void> {
    const changed = [...accounts.values()].filter((account) => account.changed);
    if (changed.length === 0) return;
    const rows = changed.map(({ path, used }) => [path, ...RESOURCES.map((resource) => used[resource])]);
    await transaction.updateMany('iam_projects', USED, Object.keys(USED).slice(1), rows);
  }

  async #reserve(
    transaction: Transaction,
    accounts: ReadonlyMap<string, Account>,
    reserves: readonly (readonly [number, Of<'reserve'>])[],
    results: Result[],
  ): Promise<void> {
    const known = await this.#known(
      transaction,
      reserves.map(([, { request }]) => request),
    );
    const made: Value[][] = [];
    for (const [i, { request }] of reserves) {
      const key = request.requestId === undefined ? undefined : keyOf(request.project, request.requestId);
      const existing = key === undefined ? undefined : known.get(key);
      if (existing !== undefined) {
        results[i] = { ...existing, existing: true };
        continue;
      }
      const chain = chainOf(request.project).map((path) => accounts.get(path));
      const refusal = refusalOf(request, chain);
      if (refusal !== undefined) {
        results[i] = refusal;
        continue;
      }
      for (const account of chain) add(account as Account, request.amounts, 1);
      const { project, requestId, amounts } = request;
      const { edge } = request;
      const id = newId(this.#options.now());
      const reservation: Reservation = { id, project, state: 'pending', edge, existing: false };
      const all = RESOURCES.map((resource) => amounts[resource]);
      made.push([id, project, request.user, requestId ?? null, this.#options.now(), edge ?? null, ...all]);
      if (key !== undefined) known.set(key, reservation);
      results[i] = reservation;
    }
    if (made.length === 0) return;
    await transaction.insertMany('iam_reservations', RESERVED, made);
  }

  async #known(transaction: Transaction, requests: readonly ReserveRequest[]): Promise<Map<string, Reservation>> {
    const named = requests.filter(({ requestId }) => requestId !== undefined);
    if (named.length === 0) return new Map();
    const from = (table: string) => `FROM ${this.#database.list} CROSS JOIN ${table} r
      WHERE r.project = ${field('project')} AND r.request_id = ${field('request')}`;
    const list = listOf(named.map(({ project, requestId }) => ({ project, request: requestId })));
    const rows = await transaction.rows<ReservationRow>(
      `SELECT r.id, r.project, r.request_id, r.placed, r.edge, r.sandbox, 0 AS ended ${from('iam_reservations')}
       UNION ALL SELECT r.id, r.project, r.request_id, 1 AS placed, r.edge, r.sandbox, 1 AS ended ${from('iam_released')}`,
      list,
      list,
    );
    return new Map(rows.map((row) => [keyOf(row.project, row.request_id ?? ''), reservationOf(row)]));
  }

  /** What a request id had come to, for whoever asks with it again. What was never placed is made anew then. */
  async #remember(transaction: Transaction, gone: readonly Row[]): Promise<void> {
    const placed = gone.filter(({ placed, request_id }) => placed === 1 && request_id !== null);
    if (placed.length === 0) return;
    const names = ['project', 'request_id', 'id', 'edge', 'sandbox'];
    await transaction.run(
      `INSERT INTO iam_released (${names}, released_at)
       SELECT ${names.map(field)}, CAST(? AS BIGINT) FROM ${this.#database.list} WHERE true ON CONFLICT DO NOTHING`,
      this.#options.now(),
      listOf(placed.map((row) => Object.fromEntries(names.map((name) => [name, row[name]])))),
    );
  }

  /** Of two for one reservation, each is measured against what the one before has left. */
  async #resize(
    transaction: Transaction,
    accounts: ReadonlyMap<string, Account>,
    resizes: readonly (readonly [number, Of<'resize'>])[],
    results: Result[],
  ): Promise<void> {
    if (resizes.length === 0) return;
    const ids = [...new Set(resizes.map(([, { id }]) => id))].map((id) => ({ id }));
    const rows = await transaction.rows<Row>(
      `SELECT id, project, ${columns()} FROM iam_reservations WHERE iam_reservations.id IN (SELECT ${field('id')} FROM ${this.#database.list})
       ORDER BY iam_reservations.id ${this.#database.forUpdate}`,
      listOf(ids),
    );
    const now = new Map(rows.map((row) => [String(row.id), { project: String(row.project), amounts: amountsOf(row) }]));
    for (const [i, { id, amounts, inUse }] of resizes) {
      const row = now.get(id);
      if (row === undefined) {
        results[i] = fail('IAM_RESERVATION_GONE', { id });
        continue;
      }
      const chain = chainOf(row.project).map((path) => accounts.get(path));
      const more = Object.fromEntries(
        RESOURCES.map((resource) => [resource, (amounts[resource] ?? row.amounts[resource]) - row.amounts[resource]]),
      ) as Record<Resource, number>;
      const refusal = refusalOf({ project: row.project, amounts: more }, chain, inUse);
      if (refusal !== undefined) {
        results[i] = refusal;
        continue;
      }
      for (const account of chain) add(account as Account, more, 1);
      row.amounts = { ...row.amounts, ...amounts };
    }
    const values = [...now].map(([id, { amounts }]) => [id, ...RESOURCES.map((resource) => amounts[resource])]);
    if (values.length > 0)
      await transaction.updateMany('iam_reservations', RESIZED, Object.keys(RESIZED).slice(1), values);
  }

  async #mark(
    transaction: Transaction,
    asking: readonly (readonly [number, Of<'asking'>])[],
    placed: readonly (readonly [number, Of<'placed'>])[],
    results: Result[],
  ): Promise<void> {
    const mark = async <M extends Of<'asking' | 'placed'>>(
      marks: readonly (readonly [number, M])[],
      columns: Columns,
      set: readonly string[],
      valuesOf: (mark: M) => Value[],
      condition: string,
    ) => {
      if (marks.length === 0) return;
      // The same order for everybody; of two for one reservation, the last counts.
      const byId = new Map(marks.map(([, mark]) => [mark.id, mark]));
      const list = [...byId.values()].sort((a, b) => (a.id < b.id ? -1 : 1));
      const done = await transaction.updateMany('iam_reservations', columns, set, list.map(valuesOf), condition);
      for (const [i, { id }] of marks) if (!done.has(id)) results[i] = fail('IAM_RESERVATION_GONE', { id });
    };
    const now = this.#options.now();
    const asked = ['edge', 'recorded_at'];
    await mark(asking, MARK, asked, ({ id, edge }) => [id, edge, null, now, 0], 'iam_reservations.placed = 0');
    // The edge was noted by `asking`: its index is left alone.
    await mark(
      placed,
      MARK,
      ['sandbox', 'recorded_at', 'placed'],
      ({ id, edge, sandbox }) => [id, edge, sandbox, now, 1],
      'iam_reservations.edge = new_edge AND (iam_reservations.placed = 0 OR iam_reservations.sandbox = new_sandbox)',
    );
  }
}

function refusalOf(
  request: Pick<ReserveRequest, 'project' | 'amounts'>,
  chain: readonly (Account | undefined)[],
  inUse = false,
): DsecError | undefined {
  if (chain.includes(undefined)) return fail('IAM_NOT_FOUND', { what: `project ${request.project}` });
  for (const { path, limits, used } of chain as readonly Account[]) {
    for (const resource of RESOURCES) {
      const asked = request.amounts[resource];
      const limit = inUse ? UNLIMITED : (limits[resource] ?? UNLIMITED);
      // Not used + asked: that may be above what is exact.
      if (asked > 0 && asked > limit - used[resource]) {
        return fail('IAM_QUOTA', { project: path, resource, used: used[resource], limit, asked });
      }
    }
  }
  return undefined;
}

function add(account: Account, amounts: ResourceAmounts, sign: 1 | -1): void {
  for (const resource of RESOURCES) account.used[resource] += sign * amounts[resource];
  account.changed = true;
}

function give(accounts: ReadonlyMap<string, Account>, row: Row): void {
  const amounts = amountsOf(row);
  for (const path of chainOf(String(row.project))) {
    const account = accounts.get(path);
    if (account !== undefined) add(account, amounts, -1);
  }
}

function keyOf(project: string, requestId: string): string {
  return `${project}\n${requestId}`;
}

function reservationOf({ id, project, placed, edge, sandbox, ended }: ReservationRow): Reservation {
  return {
    id,
    project,
    state: ended === 1 ? 'ended' : placed === 1 ? 'placed' : 'pending',
    edge: edge ?? undefined,
    sandbox: sandbox ?? undefined,
    existing: true,
  };
}

/** Begins with the time, so that new ones lie together in the index. */
function newId(now: number): string {
  if (randomAt + ID_BYTES > random.length) {
    randomFillSync(random);
    randomAt = 0;
  }
  randomAt += ID_BYTES;
  return timeText(now) + random.toString('hex', randomAt - ID_BYTES, randomAt);
}

function timeText(ms: number): string {
  return Math.max(0, ms).toString(36).padStart(9, '0');
}

const ID_BYTES = 9;
/** Taken in stock: to ask for a few bytes costs as much as for many. */
const random = Buffer.alloc(ID_BYTES * 512);
let randomAt = random.length;
