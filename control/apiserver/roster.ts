/** Every sandbox of an edge, as the edge lists it: what quotas are held against, and what is listed to clients. */
import type { Edges } from './edges.ts';
import type { Owner } from './sandbox-view.ts';

export interface RosterRow {
  /** Undefined while it is being created. */
  readonly name?: string;
  readonly state: string;
  readonly end?: { readonly reason?: string; readonly detail?: string };
  readonly owner?: Owner;
  readonly amounts?: { readonly cpuMilli: number; readonly memoryBytes: number; readonly diskBytes: number };
  readonly backend?: string;
  readonly createdAt?: string;
  readonly expiresAt?: string;
  readonly [field: string]: unknown;
}

export interface RosterAnswer {
  readonly epoch: string;
  readonly writtenAtMs: number;
  readonly sandboxes: readonly RosterRow[];
}

const ROSTER_MS = 20_000;

export interface RosterOptions {
  /** Those alone that are called so. */
  readonly name?: string;
  readonly signal?: AbortSignal;
}

/** @throws EDGE_UNREACHABLE, EDGE_UNKNOWN */
export function readRoster(edges: Edges, edge: string, { name, signal }: RosterOptions = {}): Promise<RosterAnswer> {
  const path = name === undefined ? '/v1/roster' : `/v1/roster?name=${encodeURIComponent(name)}`;
  return edges.ask<RosterAnswer>(edge, { method: 'GET', path, timeoutMs: ROSTER_MS, signal });
}

/** It still holds what it reserved; what has ended holds nothing but its files. */
export function isLive({ end }: RosterRow): boolean {
  return end === undefined;
}
