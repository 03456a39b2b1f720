/**
 * Where a node keeps its sandboxes.
 *
 *     <state>/sandboxes/<name>/record.json   what it is; written before anything else is there
 *                              upper, work   OverlayFS's; `upper` is all that the sandbox changed
 *                              disk.img, disk   instead of them, where the disk is limited by an image: disk/disk-image.ts
 *                              root          mount point
 *                              bundle/       the backend's files
 *                              commands/     of one that stays: what ran in it, and its output
 *     <state>/sandboxes/.locks/<name>        held (flock) by whoever runs, packs or removes it
 *
 * The state folder survives a reboot (kept sandboxes do), the run folder need not. Both are root's alone: an upper may
 * hold setuid programs of a sandbox's making.
 */
import { join, resolve } from 'node:path';
import { type NodeFolders, nodeFolders } from '#imagesvc';

export interface RuntimeFolders extends NodeFolders {
  /** $DSEC_STATE, else /var/lib/dsec. */
  readonly stateDir: string;
}

export function runtimeFolders(given: Partial<RuntimeFolders> = {}): RuntimeFolders {
  return {
    ...nodeFolders(given),
    stateDir: resolve(given.stateDir || process.env.DSEC_STATE || '/var/lib/dsec'),
  };
}

export interface SandboxFolders {
  readonly folder: string;
  readonly record: string;
  readonly upper: string;
  readonly work: string;
  /** Of one whose disk is limited by an image. */
  readonly diskImage: string;
  readonly disk: string;
  readonly root: string;
  readonly bundle: string;
  readonly commands: string;
  readonly lock: string;
}

export function sandboxesFolder(folders: RuntimeFolders): string {
  return join(folders.stateDir, 'sandboxes');
}

export function sandboxFolders(folders: RuntimeFolders, name: string): SandboxFolders {
  const folder = join(sandboxesFolder(folders), name);
  return {
    folder,
    record: join(folder, 'record.json'),
    upper: join(folder, 'upper'),
    work: join(folder, 'work'),
    diskImage: join(folder, 'disk.img'),
    disk: join(folder, 'disk'),
    root: join(folder, 'root'),
    bundle: join(folder, 'bundle'),
    commands: join(folder, 'commands'),
    lock: join(sandboxesFolder(folders), '.locks', name),
  };
}
