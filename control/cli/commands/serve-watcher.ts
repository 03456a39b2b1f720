/** `dsec serve watcher`: which edges there are, and which of them live. */
import type { Command } from 'commander';
import { parseEdgeOption, readEdgesFile } from '../../watcher/edge-list.ts';
import { serveWatcher } from '../../watcher/serve-watcher.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { repeated } from '../repeated.ts';
import { type ServiceOptionValues, serveUntilSignal, serviceSettings, withServiceOptions } from '../service-options.ts';

interface Options extends ServiceOptionValues {
  readonly edge?: string[];
  readonly edgesFile?: string;
  readonly poll: string;
  readonly dead: string;
}

export function addServeWatcher(serve: Command, context: Context): void {
  const command = serve.command('watcher').summary('which edges there are, which of them live, how loaded they are');
  command.description(
    'Asks every edge of a cluster for its load, again and again, and tells those who place sandboxes (docs/cluster.md). It keeps nothing on disk. Edges are named ' +
      'here or make themselves known (dsec serve edge --watcher). SIGHUP reads --edges-file and certificates again.',
  );
  withServiceOptions(command, { listen: '127.0.0.1:7072' })
    .option('--edge <id=url>', 'an edge; may be given several times', repeated)
    .option('--edges-file <file>', 'a line `ID URL` for each edge')
    .option('--poll <time>', 'between two questions to an edge', '1s')
    .option('--dead <time>', 'an edge that has not answered for so long gets no sandboxes', '5s')
    .action(async (options: Options) => {
      const settings = serviceSettings(options, 'dsec serve watcher');
      const given = (options.edge ?? []).map(parseEdgeOption);
      const { edgesFile } = options;
      const watcher = await serveWatcher({
        ...settings,
        edges: () => new Map([...(edgesFile === undefined ? [] : readEdgesFile(edgesFile)), ...given]),
        pollMs: Math.max(20, parseDuration('--poll', options.poll)),
        silenceMs: Math.max(100, parseDuration('--dead', options.dead)),
      });
      await serveUntilSignal(context, watcher, { line: `watcher at ${watcher.url}`, drainMs: settings.drainMs });
    });
  withExamples(command, [
    {
      line: 'dsec serve watcher --listen 10.0.0.1:7072 --cluster-token-file /etc/dsec/cluster-token',
      what: 'for edges that make themselves known',
    },
    {
      line: 'dsec serve watcher --edge node-1=http://10.0.0.5:7071 --cluster-token-file /etc/dsec/cluster-token',
      what: 'for one edge that is known beforehand',
    },
  ]);
}
