/** The sandboxes of the cluster, from the rosters of all edges: no list is kept anywhere. What cannot be asked now is named beside it. */
import type { Identity } from '../iam/iam.ts';
import type { Access } from './access.ts';
import type { Edges } from './edges.ts';
import type { SandboxFilter } from './request-schemas.ts';
import { isLive, type RosterRow, readRoster } from './roster.ts';
import { viewOf } from './sandbox-view.ts';

export interface SandboxList {
  readonly sandboxes: readonly object[];
  /** Edges that did not answer: what is there is not in the list. */
  readonly unreachable: readonly string[];
  /** There are more than `limit`. */
  readonly truncated?: boolean;
}

const LIMIT = 10_000;
const EDGES_AT_ONCE = 16;
const LOCAL = 'local';

/** One that was made on the machine itself belongs to nobody below root. */
export function projectOf({ owner }: Pick<RosterRow, 'owner'>): string {
  return owner === undefined || owner.project === LOCAL ? 'root' : owner.project;
}

export async function listSandboxes(
  edges: Edges,
  access: Access,
  identity: Identity,
  filter: SandboxFilter,
  signal?: AbortSignal,
): Promise<SandboxList> {
  const mayRead = await access.readable(identity);
  const { project, user, job, state, limit = LIMIT } = filter;
  const fits = (row: RosterRow) => {
    const whose = projectOf(row);
    if (project !== undefined && whose !== project && !whose.startsWith(`${project}/`)) return false;
    if (user !== undefined && row.owner?.user !== user) return false;
    if (job !== undefined && row.owner?.job !== job) return false;
    if (state === undefined ? !isLive(row) : row.state !== state) return false;
    return mayRead(whose);
  };
  const sandboxes: object[] = [];
  const unreachable: string[] = [];
  let truncated = false;
  const nodes = [...edges.nodes];
  const worker = async () => {
    for (let node = nodes.pop(); node !== undefined && !truncated; node = nodes.pop()) {
      const { edge, alive } = node;
      try {
        if (!alive) throw new Error('it is away');
        const { sandboxes: rows } = await readRoster(edges, edge, signal);
        for (const row of rows) {
          if (row.name === undefined || !fits(row)) continue;
          if (sandboxes.length >= limit) {
            truncated = true;
            break;
          }
          sandboxes.push(viewOf(edge, { ...row, name: row.name }));
        }
      } catch (error) {
        if (signal?.aborted) throw error;
        unreachable.push(edge);
      }
    }
  };
  await Promise.all(Array.from({ length: EDGES_AT_ONCE }, worker));
  return { sandboxes, unreachable: unreachable.sort(), ...(truncated ? { truncated } : {}) };
}
