/**
 * Folders and files that mounts need in the root (/proc, /dev, /sys; /etc/hosts for the host's network) and that many small
 * images lack. Left to the OCI runtime they would stay in the upper, and pack-diff would take them for a change of the
 * sandbox's. Made here instead, and taken out again while the root is still mounted; the root's own time is not touched.
 */
import { closeSync, lstatSync, openSync, rmdirSync, statSync, unlinkSync } from 'node:fs';
import { join } from 'node:path';
import { fromText } from '#base';
import { lutimes } from '#linux';
import { makeDirectoryInRoot, resolveInRoot } from './root-path.ts';

export interface MountPoint {
  readonly path: string;
  readonly kind: 'folder' | 'file';
}

/** Those of `wanted` that are missing, where their parents are there; of a link that leads nowhere (/etc/resolv.conf, often) its target. */
export function missingMountPoints(root: string, wanted: readonly MountPoint[]): MountPoint[] {
  return wanted.flatMap(({ path, kind }) => {
    const found = resolveInRoot(root, path);
    return found !== undefined && found.stat === undefined ? [{ path: found.inside, kind }] : [];
  });
}

export function makeMountPoints(root: string, points: readonly MountPoint[]): void {
  for (const { path, kind } of points) {
    keepingTimeOf(join(root, path, '..'), () => {
      if (kind === 'folder') makeDirectoryInRoot(root, path);
      else closeSync(openSync(join(root, path), 'wx', 0o644));
    });
  }
}

/** Removes what `makeMountPoints` made and nobody has put anything into. Never fails: what stays is an empty folder. */
export function removeMountPoints(root: string, paths: readonly string[]): void {
  for (const path of [...paths].reverse()) {
    try {
      const found = resolveInRoot(root, path);
      if (found?.stat === undefined || found.inside !== path) continue;
      keepingTimeOf(join(found.host, '..'), () => {
        if (found.stat?.isDirectory()) rmdirSync(found.host);
        else if (found.stat?.isFile() && lstatSync(found.host).size === 0) unlinkSync(found.host);
      });
    } catch {
      // Not empty any more, or something else by now: then it is the sandbox's.
    }
  }
}

function keepingTimeOf(folder: string, work: () => void): void {
  const { atimeNs, mtimeNs } = statSync(folder, { bigint: true });
  work();
  lutimes(fromText(folder), fileTime(atimeNs), fileTime(mtimeNs));
}

function fileTime(ns: bigint): { sec: number; nsec: number } {
  const nsec = ((ns % 1_000_000_000n) + 1_000_000_000n) % 1_000_000_000n;
  return { sec: Number((ns - nsec) / 1_000_000_000n), nsec: Number(nsec) };
}
