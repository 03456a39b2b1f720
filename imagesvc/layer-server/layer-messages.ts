/** What the main thread of the layer server and its workers say to each other. Requests come back as the kernel sent them. */
import type { OpenedLayer } from './layer-facts.ts';

export interface LayerWorkerData {
  readonly fd: number;
  readonly layers: readonly OpenedLayer[];
  /** As in data-server/raw-messages.ts. */
  readonly counters: SharedArrayBuffer;
  readonly row: number;
}
