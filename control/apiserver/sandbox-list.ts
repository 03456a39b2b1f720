/**
 * The sandboxes of the cluster, from the rosters of all edges: no list is kept anywhere. What cannot be asked now is named beside it.
 *
 * By edge, then by name, in pages: what `continue` names is where the last page ended, so any instance goes on from there, and what is there all the
 * while is told exactly once.
 */
import { fail } from '../errors.ts';
import type { Identity } from '../iam/iam.ts';
import type { Access } from './access.ts';
import type { Edges } from './edges.ts';
import type { SandboxFilter } from './request-schemas.ts';
import { isLive, type RosterRow, readRoster } from './roster.ts';
import { parseSandboxId, type SandboxAddress, sandboxId } from './sandbox-id.ts';
import { type SandboxView, viewOf } from './sandbox-view.ts';

export interface SandboxList {
  readonly sandboxes: readonly SandboxView[];
  /** Edges that did not answer: what is there is not in the list. */
  readonly unreachable: readonly string[];
  /** There are more than `limit`: for the next page. */
  readonly continue?: string;
}

const LIMIT = 10_000;
const EDGES_AT_ONCE = 16;
const LOCAL = 'local';

/** One that was made on the machine itself belongs to nobody below root. */
export function projectOf({ owner }: Pick<RosterRow, 'owner'>): string {
  return owner === undefined || owner.project === LOCAL ? 'root' : owner.project;
}

/** @throws SERVICE_BAD_REQUEST */
export async function listSandboxes(
  edges: Edges,
  access: Access,
  identity: Identity,
  filter: SandboxFilter,
  signal?: AbortSignal,
): Promise<SandboxList> {
  const mayRead = await access.readable(identity);
  const { name: called, project, user, job, state, limit = LIMIT } = filter;
  const after = filter.continue === undefined ? undefined : placeIn(filter.continue);
  const fits = (row: RosterRow) => {
    const whose = projectOf(row);
    if (called !== undefined && row.name !== called) return false;
    if (project !== undefined && whose !== project && !whose.startsWith(`${project}/`)) return false;
    if (user !== undefined && row.owner?.user !== user) return false;
    if (job !== undefined && row.owner?.job !== job) return false;
    if (state === undefined ? !isLive(row) : row.state !== state) return false;
    return mayRead(whose);
  };
  const on = async (edge: string): Promise<SandboxView[]> => {
    const { sandboxes: rows } = await readRoster(edges, edge, { name: called, signal });
    const last = after?.edge === edge ? after.name : '';
    const named = rows.flatMap((row) =>
      row.name !== undefined && row.name > last ? [{ ...row, name: row.name }] : [],
    );
    return named
      .filter(fits)
      .sort((a, b) => (a.name < b.name ? -1 : 1))
      .map((row) => viewOf(edge, row));
  };
  const sandboxes: SandboxView[] = [];
  const unreachable: string[] = [];
  const nodes = edges.nodes
    .filter(({ edge }) => after === undefined || edge >= after.edge)
    .sort((a, b) => (a.edge < b.edge ? -1 : 1));
  // A short page asks few edges, a long one many at once.
  for (let from = 0, many = 1; from < nodes.length; from += many, many = Math.min(many * 2, EDGES_AT_ONCE)) {
    const some = nodes.slice(from, from + many);
    const answers = await Promise.all(some.map(({ edge, alive }) => (alive ? on(edge).catch(away) : undefined)));
    for (const [at, found] of answers.entries()) {
      if (found === undefined) unreachable.push(some[at]!.edge);
      else sandboxes.push(...found);
    }
    if (sandboxes.length > limit) break;
  }
  if (sandboxes.length <= limit) return { sandboxes, unreachable };
  const page = sandboxes.slice(0, limit);
  const { edge, name } = page.at(-1)!;
  // Those behind the end of this page are the next one's to tell.
  const here = unreachable.filter((one) => one <= edge);
  return { sandboxes: page, unreachable: here, continue: Buffer.from(sandboxId({ name, edge })).toString('base64url') };

  function away(error: unknown): undefined {
    if (signal?.aborted) throw error;
  }
}

/** @throws SERVICE_BAD_REQUEST */
function placeIn(token: string): SandboxAddress {
  try {
    return parseSandboxId(Buffer.from(token, 'base64url').toString('latin1'));
  } catch (error) {
    throw fail('SERVICE_BAD_REQUEST', { problem: 'continue: it is not from an answer of this list' }, error);
  }
}
