/**
 * From a request to a sandbox: a node is chosen and asked; one that refuses is left out, and the next is chosen. The decision counts
 * from the moment that it is made, so that those made meanwhile see it.
 */
import { fail } from '../errors.ts';
import { type ChoiceOptions, chooseNode } from './choose-node.ts';
import type { ClusterView } from './cluster-view.ts';
import type { EdgeId } from './node-report.ts';
import type { PlacementRequest } from './placement-request.ts';

/** What an edge answers. */
export type Admission<T> =
  | { readonly admitted: true; readonly epoch: string; readonly number: number; readonly value: T }
  /** By its own pressure, which it knows better. */
  | {
      readonly admitted: false;
      readonly reason: string;
      /** Its store lacks the images that were said to be there (PlacementRequest.synced). */
      readonly notSynced?: true;
    }
  /** Nobody was asked, and nobody shall be: `stop` is thrown. */
  | { readonly admitted: false; readonly stop: unknown };

export interface PlaceOptions extends Omit<ChoiceOptions, 'excluded'> {
  /** Nodes asked before it is given up: 5 by default. */
  readonly tries?: number;
}

/**
 * `ask` rejects when nothing can be said of the outcome: then the request may have been carried out, no other node is asked, and the
 * decision counts on until a report or time settles it.
 * @throws PLACEMENT_NO_ROOM, what `ask` throws or stops with
 */
export async function placeSandbox<T>(
  cluster: ClusterView,
  asked: PlacementRequest,
  ask: (edge: EdgeId) => Promise<Admission<T>>,
  options: PlaceOptions,
): Promise<{ readonly edge: EdgeId; readonly value: T }> {
  const { tries = 5, random, candidates, overflow } = options;
  const excluded = new Set<EdgeId>();
  const choice = { random, candidates, overflow, excluded };
  const refusals: string[] = [];
  let request = asked;
  while (excluded.size < tries) {
    const { edge, reasons } = chooseNode(cluster, request, choice);
    if (edge === undefined) {
      refusals.push(...[...reasons].map(([reason, count]) => `${count} ${count === 1 ? 'node' : 'nodes'}: ${reason}`));
      break;
    }
    const decision = cluster.decide(request, edge);
    const answer = await ask(edge);
    if (answer.admitted) {
      cluster.admitted(decision, answer.epoch, answer.number);
      return { edge, value: answer.value };
    }
    cluster.withdraw(decision);
    if ('stop' in answer) throw answer.stop;
    excluded.add(edge);
    if (answer.notSynced) request = { ...request, synced: false };
    refusals.push(`${edge}: ${answer.reason}`);
  }
  throw fail('PLACEMENT_NO_ROOM', { backend: request.backend, reasons: refusals.join('; ') });
}
