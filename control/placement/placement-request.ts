/** What is asked of placement for one sandbox. */
import type { Amounts } from './amounts.ts';
import type { BackendName } from './node-report.ts';

export interface PlacementRequest {
  readonly user: string;
  /** Sandboxes that belong together, such as one training run's. */
  readonly job?: string;
  readonly backend: BackendName;
  readonly amounts: Amounts;
  /** The node must have all of them. */
  readonly labels: readonly string[];
  /** Of the graphics processors among `amounts`; any by default. */
  readonly gpuKind?: string;
  /** Keys (layer-key.ts) of the layers that it is made of. */
  readonly layers: readonly string[];
  /** All of them are in the store of the nodes that take what the others have no room for (Overflow). */
  readonly synced?: boolean;
  /** On a node without sandboxes of other users, which others do not come to either: a fault of its kernel stays this user's own. */
  readonly alone: boolean;
}
