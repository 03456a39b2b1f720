/** Which nodes may get a sandbox at all. What is refused here would be refused by the edge too, by fresher figures. */
import { lacking } from './amounts.ts';
import type { NodeView } from './node-view.ts';
import type { PlacementRequest } from './placement-request.ts';

/** The first reason that stands against the node; undefined: it may. */
export function obstacle(node: NodeView, request: PlacementRequest): string | undefined {
  const { report } = node;
  if (report.state !== 'healthy') return report.state;
  const backend = report.backends.get(request.backend);
  if (backend === undefined) return `no ${request.backend}`;
  for (const label of request.labels) if (!report.labels.has(label)) return `no label ${label}`;
  const short = lacking(report.capacity, node.reserved, request.amounts);
  if (short !== undefined) return `not enough ${short}`;
  const { gpuKind } = request;
  if (gpuKind !== undefined && (node.freeGpus(gpuKind) ?? Number.POSITIVE_INFINITY) < request.amounts.gpus) {
    return `not enough gpus of kind ${gpuKind}`;
  }
  if (node.sandboxesBy(request.backend) >= backend.limit) return `no more ${request.backend}`;
  const { heldBy } = node;
  if (heldBy !== undefined && heldBy !== request.user) return 'held by another user';
  if (request.alone && node.hasOthersThan(request.user)) return 'has sandboxes of other users';
  return undefined;
}
