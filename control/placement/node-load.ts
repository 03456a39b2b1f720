/**
 * How loaded a node is, for one request: the resource that is shortest counts, as that is the one which will hurt.
 *
 * Processor time is half what is promised and half what is measured: what runs now says little of sandboxes that idle between the steps
 * of a model, what is promised says little of those that never use it. Decisions that no report counts yet count as promised.
 */
import { share } from './amounts.ts';
import type { NodeView } from './node-view.ts';
import type { PlacementRequest } from './placement-request.ts';

/** A node that has every layer at hand may be loaded so much more. */
const LOCALITY = 0.05;
/** A node where all sandboxes are the same user's, or the same job's, counts as loaded so much more. */
const TOGETHER = 0.05;

/** Less is better. */
export function loadFor(node: NodeView, request: PlacementRequest): number {
  const { report, reserved, unreported } = node;
  const { capacity, load } = report;
  const cpu =
    (share(reserved.cpuMilli, capacity.cpuMilli) + load.cpu + share(unreported.cpuMilli, capacity.cpuMilli)) / 2;
  const memory = Math.max(share(reserved.memoryBytes, capacity.memoryBytes), load.memory);
  const disk = Math.max(share(reserved.diskBytes, capacity.diskBytes), load.disk);
  const gpus = request.amounts.gpus > 0 ? share(reserved.gpus, capacity.gpus) : 0;
  return Math.max(cpu, memory, disk, gpus) + TOGETHER * together(node, request) - LOCALITY * atHand(node, request);
}

function together(node: NodeView, { user, job }: PlacementRequest): number {
  const { sandboxes } = node;
  if (sandboxes === 0) return 0;
  return Math.max(node.ofUser(user), job === undefined ? 0 : node.ofJob(job)) / sandboxes;
}

function atHand(node: NodeView, { layers }: PlacementRequest): number {
  if (layers.length === 0) return 0;
  return layers.filter((layer) => node.report.layers.has(layer)).length / layers.length;
}
