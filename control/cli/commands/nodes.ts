/** `dsec nodes`: the edges of a cluster. */
import { humanSize } from '#base';
import type { NodeReportJson } from '../../placement/report-json.ts';
import { SandboxClient } from '../../runtime-service/sandbox-client.ts';
import type { CommandDefinition } from '../command.ts';
import { clusterEndpoint, withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface NodeRow {
  readonly edge: string;
  readonly url: string;
  readonly alive: boolean;
  readonly heardMsAgo?: number;
  readonly labels: readonly string[];
  readonly report?: NodeReportJson;
}

export const definition: CommandDefinition = {
  description:
    'Lists the edges of the cluster whose API is in force (`dsec context`, --api, $DSEC_API): whether they live and take sandboxes, how many they have, and how much of what they promise is promised.',
  examples: [
    { line: 'dsec nodes', what: 'all edges' },
    { line: "dsec nodes --json | jq -r '.[] | select(.alive | not) | .edge'", what: 'those that do not answer' },
  ],
  json: 'an array: `edge`, `url`, `alive`, `heardMsAgo`, `labels`, `report`',
  configure(command, context) {
    const { output } = context;
    withJson(withApi(command, context)).action(async ({ json }: JsonOption) => {
      const client = new SandboxClient(clusterEndpoint(context, 'dsec nodes'));
      const { nodes } = await client.ask<{ nodes: NodeRow[] }>('GET', '/v1/nodes');
      if (json) return output.json(nodes);
      if (nodes.length === 0) return output.note('no edges yet');
      const right = (title: string) => ({ title, right: true });
      await output.table(
        [
          { title: 'EDGE' },
          { title: 'STATE' },
          right('SANDBOXES'),
          right('CPU'),
          right('MEMORY'),
          right('DISK'),
          { title: 'LABELS' },
        ],
        nodes.map(({ edge, alive, labels, report }) => {
          if (report === undefined) return [edge, alive ? 'new' : 'away', '', '', '', '', labels.join(' ')];
          const { state, backends, reserved, capacity } = report;
          const sandboxes = Object.values(backends).reduce((sum, use) => sum + use.sandboxes, 0);
          return [
            edge,
            alive ? state : 'away',
            String(sandboxes),
            `${reserved.cpuMilli / 1000} / ${capacity.cpuMilli / 1000}`,
            `${humanSize(reserved.memoryBytes)} / ${humanSize(capacity.memoryBytes)}`,
            `${humanSize(reserved.diskBytes)} / ${humanSize(capacity.diskBytes)}`,
            labels.join(' '),
          ];
        }),
      );
    });
  },
};
