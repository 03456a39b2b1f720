/** `dsec serve apiserver`: the entrance of a cluster. */
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import type { Command } from 'commander';
import { CREATES, RATE_LIMIT, serveApi } from '../../apiserver/apiserver.ts';
import { OVERFLOW_ABOVE, overflowNodes } from '../../apiserver/overflow.ts';
import { clusterStateDir, writeSecret } from '../../cluster/serve-all.ts';
import { fail } from '../../errors.ts';
import { bootstrapAdmin, openIam } from '../../iam/open-iam.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { type ServiceOptionValues, serveUntilSignal, serviceSettings, withServiceOptions } from '../service-options.ts';
import { parseSize } from '../size.ts';
import { openChosenStore, type StoreOption, withStore } from '../store-option.ts';
import { projectVersion } from '../version.ts';

export interface ApiOptionValues {
  readonly defaultCpus: string;
  readonly defaultMemory: string;
  readonly defaultDisk: string;
  readonly rateLimit: string;
  readonly creates: string;
  readonly overflow?: string;
  readonly overflowAbove?: string;
}

interface Options extends ServiceOptionValues, StoreOption, ApiOptionValues {
  readonly watcher: string;
  readonly database?: string;
  readonly adminTokenFile?: string;
  readonly newAdminToken?: boolean;
}

const PROGRAM = 'dsec serve apiserver';

/** Also of `dsec serve all`, which passes them on. */
export function withApiOptions(command: Command): Command {
  return command
    .option('--default-cpus <n>', 'what a sandbox without a limit counts as', '0.5')
    .option('--default-memory <size>', 'the same of memory', '512MiB')
    .option('--default-disk <size>', 'the same of disk', '2GiB')
    .option('--rate-limit <n>', 'requests a second of one principal; 0: as many as it likes', String(RATE_LIMIT))
    .option('--creates <n>', 'creations at once; four times as many may wait', String(CREATES.atOnce))
    .option(
      '--overflow <label=store>',
      'edges of that label take what the others have no room for, as far as `dsec sync` has brought its images to that store',
    )
    .option('--overflow-above <share>', `with a larger share of the others in use (default: ${OVERFLOW_ABOVE})`);
}

export function apiArgs(options: ApiOptionValues): string[] {
  return [
    ['--default-cpus', options.defaultCpus],
    ['--default-memory', options.defaultMemory],
    ['--default-disk', options.defaultDisk],
    ['--rate-limit', options.rateLimit],
    ['--creates', options.creates],
    options.overflow === undefined ? [] : ['--overflow', options.overflow],
    options.overflowAbove === undefined ? [] : ['--overflow-above', options.overflowAbove],
  ].flat();
}

export function addServeApiserver(serve: Command, context: Context): void {
  const command = serve.command('apiserver').summary('the entrance of a cluster: its API, accounts, quotas');
  command.description(
    'Serves the API of a cluster (docs/api.md; GET /docs): knows callers by their tokens, holds their quotas, places sandboxes on edges and passes on what is asked ' +
      'of them. It keeps nothing but the database; any number may run over one PostgreSQL, and each may be killed at any moment. SIGHUP reads certificates again.',
  );
  withApiOptions(withStore(withServiceOptions(command, { listen: '127.0.0.1:7070' })))
    .requiredOption('--watcher <url>', 'the watcher of the cluster: http(s)://HOST:PORT or unix:/path')
    .option(
      '--database <url>',
      'accounts and quotas: sqlite:PATH, or postgres://USER@HOST/NAME where several run (default: sqlite, in the state folder)',
    )
    .option(
      '--admin-token-file <file>',
      'at the first start the first token of all is written there, for its user alone; where the file is missing later, a further one',
    )
    .option('--new-admin-token', 'write a further one there: for whoever has lost his')
    .action(async (options: Options) => {
      const settings = serviceSettings(options, PROGRAM);
      const cpus = Number(options.defaultCpus);
      if (!(cpus >= 0 && cpus <= 4096)) throw usage(`--default-cpus ${options.defaultCpus}: a number of processors`);
      const creates = countOf('--creates', options.creates, 1);
      const rateLimit = countOf('--rate-limit', options.rateLimit, 0);
      const { adminTokenFile, newAdminToken = false } = options;
      if (newAdminToken && adminTokenFile === undefined) throw usage('--new-admin-token needs --admin-token-file');
      const defaults = {
        cpuMilli: Math.ceil(cpus * 1000),
        memoryBytes: parseSize('--default-memory', options.defaultMemory),
        diskBytes: parseSize('--default-disk', options.defaultDisk),
      };
      if (options.overflowAbove !== undefined && options.overflow === undefined) {
        throw usage('--overflow-above needs --overflow');
      }
      const overflow =
        options.overflow === undefined ? undefined : await overflowNodes(options.overflow, options.overflowAbove);
      const store = await openChosenStore(options);
      const iam = await openIam({ database: options.database ?? `sqlite:${join(clusterStateDir(), 'iam.db')}` });
      context.defer(() => iam.close());
      if (adminTokenFile !== undefined) {
        // A first start that died between the two has left nobody who could come in.
        const anew = newAdminToken || !existsSync(adminTokenFile);
        const first = await bootstrapAdmin(iam);
        const secret = first ?? (anew ? await bootstrapAdmin(iam, { anew }) : undefined);
        if (secret !== undefined) writeSecret(adminTokenFile, secret);
        if (first === undefined && secret !== undefined) {
          const why = newAdminToken ? '--new-admin-token' : 'the file was missing';
          context.output.note(
            `dsec: a further token of the administrator is in ${adminTokenFile} (${why}); those before hold on until \`dsec token revoke\``,
          );
        }
      }
      const { token, peerTls, listen, tls, logLevel } = settings;
      const api = await serveApi({
        iam,
        store,
        overflow,
        watcherUrl: options.watcher,
        version: projectVersion(),
        token,
        peerTls,
        listen,
        tls,
        logLevel,
        defaults,
        rateLimit,
        creates: { atOnce: creates, waiting: creates * 4 },
      });
      await serveUntilSignal(context, api, { line: `apiserver at ${api.url}`, drainMs: settings.drainMs });
    });
  withExamples(command, [
    {
      line: 'dsec serve apiserver --watcher http://10.0.0.1:7072 --overflow cloud=s3://overflow/dsec --store /srv/store --cluster-token-file /etc/dsec/cluster-token',
      what: 'what finds no room goes to edges with --label cloud (dsec sync --to s3://overflow/dsec)',
    },
    {
      line: 'dsec serve apiserver --watcher http://10.0.0.1:7072 --admin-token-file /etc/dsec/admin-token --cluster-token-file /etc/dsec/cluster-token',
      what: 'with SQLite, on 127.0.0.1:7070',
    },
    {
      line: 'dsec serve apiserver --watcher http://10.0.0.1:7072 --database postgres://dsec@db/dsec --listen 0.0.0.0:7070 --tls-cert api.pem --tls-key api.key',
      what: 'one of several',
    },
  ]);

  function countOf(option: string, text: string, least: number): number {
    const count = Number(text);
    if (!/^\d{1,7}$/.test(text) || count < least) throw usage(`${option} ${text}: a number from ${least}`);
    return count;
  }
}

function usage(problem: string) {
  return fail('CLI_USAGE', { problem, program: PROGRAM });
}
