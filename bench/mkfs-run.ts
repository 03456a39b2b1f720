/**
 * mkfs.erofs on one gzip layer, as a process. Where it is too old to read tars, `tar -xzf` unpacks the layer first and its
 * time counts: that is what its user would have to do.
 */
import { mkdir, rm, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { timedCommand } from './timed-command.ts';
import type { MkfsErofs } from './tool.ts';

export interface MkfsRun {
  readonly ms: number;
  readonly cpuMs: number;
  readonly imageBytes: number;
}

/** How a result names the peer. */
export function mkfsCommand(mkfs: MkfsErofs, extra: readonly string[]): string {
  const options = [...(mkfs.readsTar ? ['--tar=f', '--ungzip'] : []), ...extra].join(' ');
  const how = mkfs.readsTar ? 'of the layer' : 'of the unpacked tree, with the time of tar -xzf';
  return `mkfs.erofs ${mkfs.version} ${options} ${how}`.replace('  ', ' ');
}

/** Makes an image in `folder` and removes it again. */
export async function runMkfs(
  mkfs: MkfsErofs,
  layer: string,
  folder: string,
  extra: readonly string[] = [],
): Promise<MkfsRun> {
  const image = join(folder, 'peer.erofs');
  const tree = join(folder, 'peer-tree');
  try {
    if (mkfs.readsTar) {
      const argv = [mkfs.path, '--quiet', '--tar=f', '--ungzip', ...extra, image, layer];
      const { ms, cpuMs } = await timedCommand(argv);
      return { ms, cpuMs, imageBytes: (await stat(image)).size };
    }
    await mkdir(tree);
    const unpacked = await timedCommand(['tar', '-xzpf', layer, '-C', tree]);
    const made = await timedCommand([mkfs.path, '--quiet', ...extra, image, tree]);
    return { ms: unpacked.ms + made.ms, cpuMs: unpacked.cpuMs + made.cpuMs, imageBytes: (await stat(image)).size };
  } finally {
    await rm(image, { force: true });
    await rm(tree, { recursive: true, force: true });
  }
}
