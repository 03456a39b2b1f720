/** What a watcher says of its cluster, and how it is read: by API servers, which lay their own decisions over it. */
import type { EdgeId, NodeReport } from '../placement/node-report.ts';
import { type NodeReportJson, reportFromJson } from '../placement/report-json.ts';

export interface ClusterNodeJson {
  readonly edge: EdgeId;
  readonly url: string;
  readonly labels: readonly string[];
  /** The last one; undefined for an edge that never answered. `state` is `dead` in it for one that does not answer now. */
  readonly report?: NodeReportJson;
  /** Since its last answer; undefined: there was none. */
  readonly heardMsAgo?: number;
  readonly alive: boolean;
}

export interface ClusterJson {
  /** Another one after each start of the watcher. */
  readonly epoch: string;
  /** Since that start: at first it may not have heard of all edges. */
  readonly upMs: number;
  readonly atMs: number;
  readonly nodes: readonly ClusterNodeJson[];
}

export interface ClusterNode {
  readonly edge: EdgeId;
  readonly url: string;
  readonly alive: boolean;
  readonly heardMsAgo: number | undefined;
  readonly report: NodeReport | undefined;
}

/** @throws SERVICE_REPORT */
export function clusterNodes({ nodes }: ClusterJson): ClusterNode[] {
  return nodes.map(({ edge, url, alive, heardMsAgo, report }) => ({
    edge,
    url,
    alive,
    heardMsAgo,
    report: report === undefined ? undefined : reportFromJson(report),
  }));
}
