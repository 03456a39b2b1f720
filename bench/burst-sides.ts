/**
 * The three ways of burst.bench.ts to have many images at a node, each with a disk of its own and everything cold: all of it
 * local, on demand from an S3 server, and pulled whole by dockerd from a registry. Each answers the output of one sandbox.
 */
import { cpSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { type BlobStore, ensureDataServer, openImage, openStore, stopDataServers } from '#imagesvc';
import { type RuntimeFolders, runContainer } from '#runtime';
import { DockerDaemon } from './docker-daemon.ts';
import type { CacheNumbers } from './lazy-image.ts';
import { s3Url } from './loopback-servers.ts';
import { timedCommand } from './timed-command.ts';

export interface Side {
  /** Starts a sandbox of the image, runs the command to its end, and answers what it printed. */
  run(image: string, command: readonly string[]): Promise<string>;
  /** Bytes that its cache has asked a store for. */
  fetchedBytes?(): Promise<number>;
  stop(): Promise<void>;
}

/** @param folder On the node's disk. @param store Folder of the store that is copied to it. */
export async function localSide(folder: string, store: string): Promise<Side> {
  cpSync(store, join(folder, 'store'), { recursive: true });
  const opened = await openStore(`file://${join(folder, 'store')}`);
  return { run: (image, command) => runIn(opened, foldersIn(folder), image, command), stop: async () => {} };
}

/** @param host Of the S3 server, behind its link. Its data server runs before the burst comes, as dockerd does. */
export async function onDemandSide(folder: string, host: string): Promise<Side> {
  const store = await openStore(s3Url(host));
  const folders = foldersIn(folder);
  const server = await ensureDataServer(store.url, folders);
  return {
    run: (image, command) => runIn(store, folders, image, command),
    async fetchedBytes() {
      const { interactiveBytes, prefetchBytes } = (await server.stats()).cache as CacheNumbers;
      return interactiveBytes + prefetchBytes;
    },
    stop: () => stopDataServers({ ...folders, force: true }),
  };
}

/** @param host Of the registry, behind its link. */
export async function eagerSide(folder: string, host: string): Promise<Side & { readonly version: string }> {
  const docker = await DockerDaemon.start(join(folder, 'd'));
  return {
    version: docker.version,
    async run(image, command) {
      const reference = `${host}/${image}`;
      await timedCommand(docker.argv(['pull', '--quiet', reference]), { stdout: 'drop' });
      return (await timedCommand(docker.argv(['run', '--rm', '--network=none', reference, ...command]))).stdout;
    },
    stop: () => docker.stop(),
  };
}

function foldersIn(folder: string): RuntimeFolders {
  const folders = { runDir: join(folder, 'run'), cacheDir: join(folder, 'cache'), stateDir: join(folder, 'state') };
  for (const path of Object.values(folders)) mkdirSync(path, { recursive: true });
  return folders;
}

/** As an edge does it: one process for all sandboxes of the node. */
async function runIn(
  store: BlobStore,
  folders: RuntimeFolders,
  name: string,
  command: readonly string[],
): Promise<string> {
  const output: Buffer[] = [];
  const { exitCode } = await runContainer({
    store,
    base: await openImage(store, name),
    command,
    folders,
    stdio: { onStdout: (bytes) => void output.push(bytes) },
  });
  const text = Buffer.concat(output).toString();
  if (exitCode !== 0) throw new Error(`the sandbox of ${name} ended with ${exitCode}: ${text}`);
  return text;
}
