/** `dsec drain`: an edge that takes nothing new. */
import { SandboxClient } from '../../runtime-service/sandbox-client.ts';
import type { CommandDefinition } from '../command.ts';
import { clusterEndpoint, withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Has an edge of the cluster take no new sandboxes; those that it has go on, and are reached. It holds over a restart of the edge, until --off.',
  examples: [
    { line: 'dsec drain node-1', what: 'before work on the machine' },
    { line: 'dsec drain node-1 --off', what: 'it takes sandboxes again' },
  ],
  json: 'an object: `edge`, `draining`',
  configure(command, context) {
    const { output } = context;
    withJson(withApi(command, context))
      .argument('<edge>', 'as `dsec nodes` shows it')
      .option('--off', 'let it take sandboxes again')
      .action(async (edge: string, { off = false, json }: JsonOption & { readonly off?: boolean }) => {
        const client = new SandboxClient(clusterEndpoint(context, 'dsec drain'));
        const path = `/v1/nodes/${encodeURIComponent(edge)}/drain`;
        const drained = await client.ask<object>('POST', path, { on: !off });
        if (json) return output.json(drained);
        await output.line(off ? `${edge}: takes sandboxes` : `${edge}: draining`);
      });
  },
};
