/** What the edge's HTTP needs of whoever has the sandboxes: a node's real ones (edge-node.ts), or those of a simulated edge. */
import type { SandboxEnd } from '#runtime';
import type { Amounts } from '../placement/amounts.ts';
import type { BackendName, NodeReport } from '../placement/node-report.ts';
import type { SandboxOwner } from './sandbox-owner.ts';

export interface RosterEntry {
  /** Undefined while it is being created. */
  readonly name?: string;
  readonly state: 'creating' | 'running' | 'paused' | 'ended';
  readonly end?: SandboxEnd;
  readonly owner: SandboxOwner;
  readonly amounts: Amounts;
  readonly backend: BackendName;
  /** Of a container, what started it. */
  readonly runtime?: string;
  /** What it was made of; of a simulated one nothing. */
  readonly base?: { readonly name: string; readonly digest: string };
  readonly createdAt?: string;
  readonly expiresAt?: string;
}

/** All that the edge has when it is written, those under way among them. */
export interface Roster {
  readonly edge: string;
  readonly epoch: string;
  readonly writtenAtMs: number;
  readonly sandboxes: readonly RosterEntry[];
}

export interface EdgeHost {
  readonly edge: string;
  report(): NodeReport;
  roster(): Roster;
  /** From now on nothing comes, or something may again. Holds on when the edge starts anew. */
  drain(on: boolean): void;
}
