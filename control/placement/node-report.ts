/**
 * What an edge tells of itself, as the watcher heard it last. It is seconds old when a decision is made of it; `admitted` says which of the
 * decisions made since are in its figures already.
 */
import type { Amounts } from './amounts.ts';

export type EdgeId = string;
export type BackendName = 'fncall' | 'container' | 'microvm' | 'vm';

export interface BackendUse {
  readonly sandboxes: number;
  /** As many as the edge takes. */
  readonly limit: number;
}

/** Graphics processors of one kind. */
export interface GpuUse {
  readonly cards: number;
  readonly free: number;
}

export interface NodeReport {
  readonly edge: EdgeId;
  /** Another one after each start of the edge: `admitted` counts from zero again then. */
  readonly epoch: string;
  /** Sandboxes that the edge had admitted since its start when it wrote this. */
  readonly admitted: number;
  /** `draining`: what runs goes on, nothing comes. */
  readonly state: 'healthy' | 'draining' | 'dead';
  /** Those that are missing the edge cannot do. */
  readonly backends: ReadonlyMap<BackendName, BackendUse>;
  readonly labels: ReadonlySet<string>;
  readonly capacity: Amounts;
  /** Promised to the sandboxes that it has. */
  readonly reserved: Amounts;
  /** By kind, of those that `capacity` counts; absent where the edge does not say. */
  readonly gpuKinds?: ReadonlyMap<string, GpuUse>;
  /** Measured, 0 to 1 of the machine. */
  readonly load: { readonly cpu: number; readonly memory: number; readonly disk: number };
  /** Sandboxes of each. */
  readonly users: ReadonlyMap<string, number>;
  readonly jobs: ReadonlyMap<string, number>;
  /** A user who asked to be alone has sandboxes here. */
  readonly heldBy: string | undefined;
  /** Keys (layer-key.ts) of layers of which the edge has the data at hand, in whole or in part. */
  readonly layers: ReadonlySet<string>;
}
