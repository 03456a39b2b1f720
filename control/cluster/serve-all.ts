/**
 * A whole cluster on one machine: an edge, a watcher and an apiserver as processes of their own, that find each other over sockets only root may open. What
 * has to stay is in the state folder: accounts and quotas, the tokens. The sandboxes are the edge's, and stay when all of this ends.
 */
import { randomBytes } from 'node:crypto';
import { existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { runtimeFolders } from '#runtime';
import { fail } from '../errors.ts';
import { PeerClient } from '../service-base/peer-client.ts';
import { Supervisor, type SupervisorOptions } from './supervisor.ts';

export interface ServeAllOptions extends SupervisorOptions {
  /** Of the apiserver. */
  readonly listen: string;
  readonly database?: string;
  readonly logLevel: string;
  readonly edgeArgs: readonly string[];
  readonly apiArgs: readonly string[];
  /** End the sandboxes too. */
  readonly stopSandboxes: boolean;
}

export interface ServingAll {
  readonly url: string;
  readonly edge: string;
  readonly stateDir: string;
  readonly adminTokenFile: string;
  pidOf(name: 'edge' | 'watcher' | 'apiserver'): number | undefined;
  close(drainMs: number): Promise<void>;
}

/** As bin/dsec starts an API server. */
const YOUNG_SPACE = '--max-semi-space-size=64';

export function clusterStateDir(): string {
  return join(runtimeFolders().stateDir, 'cluster');
}

/** @throws CLUSTER_SERVICE */
export async function serveAll(options: ServeAllOptions): Promise<ServingAll> {
  const stateDir = clusterStateDir();
  const runDir = join(runtimeFolders().runDir, 'cluster');
  for (const folder of [stateDir, runDir]) mkdirSync(folder, { recursive: true, mode: 0o700 });
  const tokenFile = join(stateDir, 'cluster-token');
  const token = secretIn(tokenFile);
  const adminTokenFile = join(stateDir, 'admin-token');
  const edgeUrl = `unix:${join(runDir, 'edge.sock')}`;
  const watcherUrl = `unix:${join(runDir, 'watcher.sock')}`;
  const database = options.database ?? `sqlite:${join(stateDir, 'iam.db')}`;
  const common = ['--cluster-token-file', tokenFile, '--log-level', options.logLevel];
  const supervisor = new Supervisor(options);
  const close = async (drainMs: number) => {
    if (options.stopSandboxes) await stopAll(edgeUrl, token, options.say);
    await supervisor.end(drainMs);
  };
  try {
    const [, edge = ''] = await supervisor.start({
      name: 'edge',
      args: ['serve', 'edge', '--listen', edgeUrl, ...common, ...options.edgeArgs],
      ready: /^edge (\S+) at /m,
    });
    await supervisor.start({
      name: 'watcher',
      args: ['serve', 'watcher', '--listen', watcherUrl, '--edge', `${edge}=${edgeUrl}`, ...common],
      ready: /^watcher at /m,
    });
    const apiArgs = (listen: string) => [
      ...['serve', 'apiserver', '--listen', listen, '--watcher', watcherUrl, '--database', database],
      ...['--admin-token-file', adminTokenFile, ...common, ...options.apiArgs],
    ];
    const [, url = ''] = await supervisor.start({
      name: 'apiserver',
      nodeArgs: [YOUNG_SPACE],
      args: apiArgs(options.listen),
      ready: /^apiserver at (\S+)/m,
      argsAgain: ([, was = '']) => apiArgs(was.startsWith('unix:') ? was : new URL(was).host),
    });
    return {
      url,
      edge,
      stateDir,
      adminTokenFile,
      pidOf: (name) => supervisor.pidOf(name),
      close,
    };
  } catch (error) {
    await supervisor.end(0);
    throw error;
  }
}

function secretIn(file: string): string {
  if (!existsSync(file)) writeSecret(file, randomBytes(32).toString('hex'));
  return readFileSync(file, 'utf8').trim();
}

/** Nobody else may read it, not for a moment. @throws CLUSTER_STATE */
export function writeSecret(file: string, secret: string): void {
  try {
    rmSync(file, { force: true });
    writeFileSync(file, `${secret}\n`, { mode: 0o600, flag: 'wx' });
  } catch (error) {
    throw fail('CLUSTER_STATE', { file, problem: (error as Error).message }, error);
  }
}

async function stopAll(url: string, token: string, say: (text: string) => void): Promise<void> {
  const edge = new PeerClient({ url, token });
  try {
    const { sandboxes } = await edge.json<{ sandboxes: { name?: string; state: string }[] }>({
      method: 'GET',
      path: '/v1/roster',
    });
    await Promise.all(
      sandboxes.map(async ({ name, state }) => {
        if (name === undefined || state === 'ended') return;
        const path = `/v1/sandboxes/${encodeURIComponent(name)}/stop`;
        await edge.json({ method: 'POST', path, body: {} }).catch((error: Error) => say(`${name}: ${error.message}`));
      }),
    );
  } catch (error) {
    say(`its sandboxes were not ended: ${(error as Error).message}`);
  } finally {
    await edge.close();
  }
}
