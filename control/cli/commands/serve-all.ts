/** `dsec serve all`: a whole cluster on this machine. */
import type { Command } from 'commander';
import { clusterStateDir, serveAll } from '../../cluster/serve-all.ts';
import { choice } from '../choice.ts';
import type { Context } from '../context.ts';
import { contextsPath, readContexts, writeContexts } from '../contexts.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { repeated } from '../repeated.ts';
import { LEVELS, serveUntilSignal } from '../service-options.ts';
import { type StoreOption, withStore } from '../store-option.ts';
import { type ApiOptionValues, apiArgs, withApiOptions } from './serve-apiserver.ts';

interface Options extends StoreOption, ApiOptionValues {
  readonly listen: string;
  readonly tlsCert?: string;
  readonly tlsKey?: string;
  readonly database?: string;
  readonly id?: string;
  readonly label?: string[];
  readonly gpu?: string[];
  readonly gpuInstances?: string;
  readonly capacity?: string;
  readonly reserve?: string;
  readonly pressure?: string;
  readonly keepEnded?: string;
  readonly context: string;
  readonly stopSandboxes?: boolean;
  readonly drain: string;
  readonly logLevel: string;
}

export function addServeAll(serve: Command, context: Context): void {
  const command = serve.command('all').summary('a whole cluster on this machine: edge, watcher, API, console');
  command.description(
    'Runs an edge, a watcher and an apiserver together, and starts again what dies. What has to stay is in the state folder; the first start makes a token of an ' +
      'administrator there, and a context, so that `dsec sandbox` and the SDKs find it. The console is at /console/. SIGTERM ends all of it; sandboxes live on, and the ' +
      'next one has them, unless --stop-sandboxes. Needs root, as sandboxes do.',
  );
  withApiOptions(withStore(command))
    .option('--listen <address>', 'of the API: HOST:PORT', '127.0.0.1:7070')
    .option('--tls-cert <file>', 'serve TLS with this certificate')
    .option('--tls-key <file>', 'the key of --tls-cert')
    .option('--database <url>', 'accounts and quotas: sqlite:PATH or postgres://... (default: in the state folder)')
    .option('--id <id>', 'of the edge (default: the name of the machine)')
    .option('--label <label>', 'of the edge; may be given several times', repeated)
    .option(
      '--gpu <kind=devices>',
      'of the edge: a graphics processor; once for each (default: as nvidia-smi says)',
      repeated,
    )
    .option('--gpu-instances <who>', 'of the edge: who gets the instances of divided ones (MIG): tasks or sandboxes')
    .option('--capacity <amounts>', 'of the edge: cpus=N,memory=SIZE,disk=SIZE,gpus=N,sandboxes=N')
    .option('--reserve <shares>', 'of the edge: memory=0.05,disk=0.05: with less free it takes nothing')
    .option('--pressure <shares>', 'of the edge: cpu=1,memory=0.5,io=0.95: pressed harder it takes nothing')
    .option('--keep-ended <time>', 'of the edge: remove a sandbox so long after it has ended')
    .option('--context <name>', 'the context that is made, and current if none was', 'local-cluster')
    .option('--no-context', 'make none')
    .option('--stop-sandboxes', 'end the sandboxes too when it ends')
    .option('--drain <time>', 'how long what is being answered may go on after SIGTERM', '10s')
    .option('--log-level <level>', `of the logs on stderr: ${LEVELS.join(', ')}`, 'warn')
    .action(async (options: Options) => {
      const { output } = context;
      const drainMs = parseDuration('--drain', options.drain);
      const given = (pairs: readonly (readonly [string, string | undefined])[]) =>
        pairs.flatMap(([name, value]) => (value === undefined ? [] : [name, value]));
      const store = given([['--store', options.store]]);
      const drain = ['--drain', options.drain];
      const script = process.argv[1];
      const all = await serveAll({
        command: [process.execPath, ...process.execArgv, ...(script === undefined ? [] : [script])],
        env: process.env,
        say: (text) => output.note(`dsec: ${text}`),
        listen: options.listen,
        database: options.database,
        logLevel: choice('--log-level', options.logLevel, LEVELS),
        stopSandboxes: options.stopSandboxes ?? false,
        edgeArgs: [
          ...store,
          ...drain,
          ...given([
            ['--id', options.id],
            ['--gpu-instances', options.gpuInstances],
            ['--capacity', options.capacity],
            ['--reserve', options.reserve],
            ['--pressure', options.pressure],
            ['--keep-ended', options.keepEnded],
          ]),
          ...(options.label ?? []).flatMap((label) => ['--label', label]),
          ...(options.gpu ?? []).flatMap((gpu) => ['--gpu', gpu]),
        ],
        apiArgs: [
          ...store,
          ...drain,
          ...apiArgs(options),
          ...given([
            ['--tls-cert', options.tlsCert],
            ['--tls-key', options.tlsKey],
          ]),
        ],
      });
      const name = typeof options.context === 'string' ? options.context : undefined;
      const isCurrent = name !== undefined && rememberContext(name, all.url, all.adminTokenFile);
      const api = isCurrent ? '' : name === undefined ? ` --api ${all.url}` : ` --api ${name}`;
      const lines = [
        `cluster at ${all.url}: edge ${all.edge}, state in ${all.stateDir}`,
        `console: ${all.url}/console/    its token: sudo cat ${all.adminTokenFile}`,
        `next:    dsec sandbox run${api} IMAGE -- echo hello      (dsec images shows what there is)`,
        ...(name === undefined
          ? []
          : [
              `SDKs and commands of this user find it as context ${name}; elsewhere: DSEC_API=${all.url} DSEC_TOKEN=...`,
            ]),
      ];
      await serveUntilSignal(context, all, { line: lines.join('\n'), drainMs });
    });
  withExamples(command, [
    { line: 'sudo dsec serve all', what: `on 127.0.0.1:7070, with its state in ${clusterStateDir()}` },
    { line: 'sudo dsec serve all --listen 0.0.0.0:7070 --tls-cert api.pem --tls-key api.key', what: 'for others too' },
  ]);
}

/** Whether it is the current one. */
function rememberContext(name: string, url: string, tokenFile: string): boolean {
  const path = contextsPath();
  const { current, contexts } = readContexts(path);
  const next = current ?? name;
  writeContexts(path, { current: next, contexts: { ...contexts, [name]: { url, tokenFile } } });
  return next === name;
}
