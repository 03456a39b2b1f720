/** Bare `crun run` of an image's files, as the fastest way that others have: unpacked before, the bundle made before, no engine in between. */
import { execFileSync } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { readMountInfo } from '#linux';

/** The command line; `layers`: tar.gz, bottom first. */
export function crunBundle(folder: string, layers: readonly string[], args: readonly string[]): () => string[] {
  const root = join(folder, 'rootfs');
  mkdirSync(root, { recursive: true });
  for (const layer of layers) execFileSync('tar', ['-xzf', layer, '-C', root]);
  execFileSync('crun', ['spec'], { cwd: folder });
  const path = join(folder, 'config.json');
  const config = JSON.parse(readFileSync(path, 'utf8'));
  config.process.terminal = false;
  config.process.args = args;
  config.root = { path: 'rootfs', readonly: false };
  writeFileSync(path, JSON.stringify(config));
  let count = 0;
  return () =>
    hidingUnified(['crun', '--cgroup-manager=cgroupfs', 'run', '--bundle', folder, `bench-${process.pid}-${count++}`]);
}

/** crun refuses v1 hierarchies beside a v2 tree: there it gets a mount namespace without that. */
function hidingUnified(command: readonly string[]): string[] {
  const rows = readMountInfo();
  const v2 = rows.find(({ type }) => type === 'cgroup2');
  if (v2 === undefined || !rows.some(({ type }) => type === 'cgroup')) return [...command];
  const script = `mount -t tmpfs none ${v2.mountPoint} && exec "$@"`;
  return ['unshare', '-m', '--propagation', 'private', 'sh', '-c', script, 'sh', ...command];
}
