/** Programs that are measured against: where they are, which version, and what to tell whoever lacks one. */
import { spawnSync } from 'node:child_process';
import { accessSync, constants } from 'node:fs';
import { delimiter, join } from 'node:path';
import { findAgent } from '#runtime';

/** The path of a program, or undefined. */
export function findTool(name: string): string | undefined {
  for (const folder of [...(process.env.PATH ?? '').split(delimiter), '/usr/sbin', '/sbin']) {
    const path = join(folder, name);
    try {
      accessSync(path, constants.X_OK);
      return path;
    } catch {
      // Not here.
    }
  }
  return undefined;
}

/** `x is missing (apt-get install y)` for the first tool that is not there. */
export function missingTool(tools: Readonly<Record<string, string>>): string | undefined {
  for (const [tool, apt] of Object.entries(tools)) {
    if (findTool(tool) === undefined) return `${tool} is missing (apt-get install ${apt})`;
  }
  return undefined;
}

export function needsRoot(): string | undefined {
  return process.getuid?.() === 0 ? undefined : 'it mounts, which needs root';
}

export function agentMissing(): string | undefined {
  return findAgent() === undefined ? 'dsec-agent is not built (node scripts/setup.mjs, with rustc)' : undefined;
}

export interface MkfsErofs {
  readonly path: string;
  readonly version: string;
  /** Reads a gzip layer itself: `--tar=f --ungzip`, from 1.7 on. Older ones need an unpacked tree. */
  readonly readsTar: boolean;
}

export const MKFS_MISSING =
  'mkfs.erofs is missing (erofs-utils 1.9.3, built from its source: name it in $MKFS_EROFS or put it on the PATH; apt-get install erofs-utils gives an older one)';

/** $MKFS_EROFS, else the one on the PATH. */
export function findMkfsErofs(): MkfsErofs | undefined {
  const path = process.env.MKFS_EROFS || findTool('mkfs.erofs');
  if (path === undefined) return undefined;
  const help = spawnSync(path, ['--help'], { encoding: 'utf8' });
  if (help.error !== undefined) return undefined;
  const text = `${help.stdout}${help.stderr}`;
  // Old ones say their version in front of everything else, new ones when asked.
  const said = spawnSync(path, ['-V'], { encoding: 'utf8' });
  const version = /mkfs\.erofs[^\d\n]*(\d+\.\d+(?:\.\d+)?)/.exec(`${said.stdout}${said.stderr}${text}`)?.[1];
  return { path, version: version ?? 'of unknown version', readsTar: text.includes('--ungzip') };
}
