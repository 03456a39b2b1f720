/** `dsec serve all` with real containers, a small image, and a door before it that breaks things as it is told. */
import { type ChildProcess, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { readMountInfo, umount } from '#linux';
import { findAgent } from '#runtime';
import { runCommand } from '../command-run.ts';
import { Front } from './front.ts';

export const root = join(import.meta.dirname, '../../..');
export const canRun = process.getuid?.() === 0 && findAgent() !== undefined && fs.existsSync('/bin/busybox');
if (!canRun) console.log('skipped: not root, or no dsec-agent, or no busybox');

export const IMAGE = 'bb:1';
/** Below `folder`: what the image is made of. */
export const TREE = 'tree';

const TOOLS =
  'sh cat echo sleep head wc tr id env stty mkdir ls sha256sum kill pwd dd ps true false grep touch seq sort'.split(
    ' ',
  );
const PATIENCE_MS = 300_000;

export interface World {
  readonly folder: string;
  /** Of the door. */
  readonly url: string;
  readonly token: string;
  readonly front: Front;
  /** For other processes: DSEC_API, DSEC_TOKEN. */
  readonly env: NodeJS.ProcessEnv;
  /** SIGKILL to edge, watcher and apiserver, each of which is started again; sandboxes go on. */
  restart(): Promise<void>;
  close(): Promise<void>;
}

export async function makeWorld(image = IMAGE): Promise<World> {
  const saved = { ...process.env };
  const folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-sdk-')));
  for (const name of ['store', 'run', 'state', 'cache']) process.env[`DSEC_${name.toUpperCase()}`] = join(folder, name);
  process.env.XDG_CONFIG_HOME = join(folder, 'config');
  await runCommand('convert', `dir:${makeTree(join(folder, TREE))}`, '--name', image);
  const cluster = await startCluster();
  const listed = await askedUntil(cluster);
  if (listed === undefined) throw new Error('the cluster does not answer');
  const restart = async () => {
    for (const pid of childrenOf(cluster.child.pid!)) process.kill(pid, 'SIGKILL');
    await askedUntil(cluster);
  };
  const { hostname: host, port } = new URL(cluster.url);
  const front = new Front({ target: { host, port: Number(port) }, restart });
  const url = await front.listen();
  const env = { ...process.env, DSEC_API: url, DSEC_TOKEN: cluster.token };
  return {
    folder,
    url,
    token: cluster.token,
    front,
    env,
    restart,
    async close() {
      await front.close();
      const end = new Promise((resolve) => cluster.child.once('exit', resolve));
      cluster.child.kill('SIGTERM');
      await end;
      for (const row of readMountInfo().reverse()) {
        if (row.mountPoint.startsWith(`${folder}/`)) umount(row.mountPoint, { lazy: true });
      }
      for (const name of Object.keys(process.env)) if (!(name in saved)) delete process.env[name];
      Object.assign(process.env, saved);
      fs.rmSync(folder, { recursive: true, force: true });
    },
  };
}

function makeTree(tree: string): string {
  for (const name of ['bin', 'dev', 'etc', 'proc', 'sys', 'tmp', 'root', 'workspace']) {
    fs.mkdirSync(join(tree, name), { recursive: true });
  }
  fs.copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
  for (const name of TOOLS) fs.symlinkSync('busybox', join(tree, 'bin', name));
  fs.writeFileSync(join(tree, 'etc/passwd'), 'root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n');
  fs.writeFileSync(join(tree, 'etc/group'), 'root:x:0:\nagent:x:1000:\n');
  return tree;
}

interface Cluster {
  readonly child: ChildProcess;
  readonly url: string;
  readonly token: string;
}

async function startCluster(): Promise<Cluster> {
  // One that stays the same when the apiserver is started again.
  const options = ['--listen', `127.0.0.1:${await freePort()}`, '--id', 'edge-1', '--stop-sandboxes', '--drain', '2s'];
  const child = spawn(process.execPath, [join(root, 'bin/dsec'), 'serve', 'all', ...options], {
    cwd: root,
    env: process.env,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let log = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (bytes) => (log += bytes));
  for (const until = Date.now() + PATIENCE_MS; !/^cluster at /m.test(log); await delay(50)) {
    if (Date.now() > until || child.exitCode !== null) throw new Error(`the cluster has not begun: ${log}`);
  }
  const url = /^cluster at (\S+?):? /m.exec(log)![1]!;
  const token = fs.readFileSync(join(process.env.DSEC_STATE!, 'cluster/admin-token'), 'utf8').trim();
  return { child, url, token };
}

function freePort(): Promise<number> {
  return new Promise((resolve) => {
    const server = createServer().listen(0, '127.0.0.1', () => {
      const { port } = server.address() as AddressInfo;
      server.close(() => resolve(port));
    });
  });
}

/** Until edge and watcher are heard through the apiserver. */
async function askedUntil({ url, token }: Cluster): Promise<object | undefined> {
  for (const until = Date.now() + PATIENCE_MS; Date.now() < until; await delay(100)) {
    try {
      const answer = await fetch(`${url}/v1/sandboxes`, { headers: { authorization: `Bearer ${token}` } });
      const list = (await answer.json()) as { sandboxes?: object[]; unreachable?: string[] };
      if (list.sandboxes !== undefined && list.unreachable?.length === 0) return list;
    } catch {
      // Not there yet.
    }
  }
  return undefined;
}

function childrenOf(pid: number): number[] {
  const text = fs.readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8');
  return text.split(' ').filter(Boolean).map(Number);
}
