/**
 * Nodes elsewhere, such as a cloud's, that take what the others have no room for: known by a label, with a store of their own that `dsec sync` fills.
 * What goes there is named by digest, since a name may mean something else in that store by now.
 */
import { openStore } from '#imagesvc';
import { fail } from '../errors.ts';
import type { Overflow } from '../placement/choose-node.ts';
import type { ClusterView } from '../placement/cluster-view.ts';

export interface OverflowNodes extends Overflow {
  /** As their edges open it, and as `dsec sync --to` was told. */
  readonly storeUrl: string;
}

export const OVERFLOW_ABOVE = 0.8;

/** `cloud=s3://bucket/dsec`; `above`: a share, as text. @throws API_OVERFLOW, STORE_URL and what else `openStore` throws */
export async function overflowNodes(text: string, above = String(OVERFLOW_ABOVE)): Promise<OverflowNodes> {
  const [, label, url] = /^([^=\s]{1,200})=(\S+)$/.exec(text) ?? [];
  if (label === undefined || url === undefined) throw fail('API_OVERFLOW', { text, problem: 'it is LABEL=STORE' });
  const share = /^(?:0?\.\d+|0|1)$/.test(above) ? Number(above) : Number.NaN;
  if (!(share >= 0 && share < 1)) throw fail('API_OVERFLOW', { text: above, problem: 'a share from 0 to below 1' });
  return { label, above: share, storeUrl: (await openStore(url)).url };
}

export function isOverflow(view: ClusterView, edge: string, overflow: OverflowNodes | undefined): boolean {
  return overflow !== undefined && view.get(edge)?.report.labels.has(overflow.label) === true;
}

/** What an edge answers whose store lacks an image, or a part of it. It has done nothing then. */
export const LACKING: ReadonlySet<string> = new Set(['CATALOG_NOT_FOUND', 'STORE_BLOB_MISSING']);
