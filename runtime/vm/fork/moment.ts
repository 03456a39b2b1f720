/**
 * A moment of a machine, of which forks are made: a folder in its sandbox's, there while they are being made and no longer.
 *
 *     machine/       the snapshot of its memory and devices (snapshot/snapshot-folder.ts)
 *     disk-NAME      of a microVM: each of its disks as one sealed layer, as it was then
 *     commands/      of a microVM: the commands that ran, and their output so far
 *     disk.qcow2     of a full machine (full/disk-copy.ts)
 *
 * It is on the file system of all sandboxes: what no fork changes, a fork has as another name of the same file.
 */
import { randomUUID } from 'node:crypto';
import { readdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { MachineFacts } from '../full/machine-facts.ts';
import type { VmFacts } from '../machine-facts.ts';
import type { VmSpec } from '../vm-driver.ts';

export interface Moment {
  readonly folder: string;
  /** Milliseconds since 1970, and how long it had stood still in its life until then. */
  readonly atMs: number;
  readonly stoodMs: number;
  /** Of a microVM: its machine, as the snapshot is restored by. */
  readonly spec?: VmSpec;
  /** Of its network, where it has one: what its guest believes to be its own. */
  readonly networkNumber?: number;
  /** Of a microVM. */
  readonly vm?: VmFacts;
  /** Of a full machine. */
  readonly machine?: MachineFacts;
  readonly mountPoints: readonly string[];
  /** No fork is being made of it any more. Twice is no error. */
  discard(): Promise<void>;
}

const FOLDER = /^moment-/;

export function newMomentFolder(sandboxFolder: string): string {
  return join(sandboxFolder, `moment-${randomUUID()}`);
}

export function machineOf(momentFolder: string): string {
  return join(momentFolder, 'machine');
}

export function diskLayerOf(momentFolder: string, disk: string): string {
  return join(momentFolder, `disk-${disk}`);
}

export function commandsOf(momentFolder: string): string {
  return join(momentFolder, 'commands');
}

/** Those of a service that was killed meanwhile. */
export async function removeMoments(sandboxFolder: string): Promise<void> {
  for (const name of await readdir(sandboxFolder)) {
    if (FOLDER.test(name)) await rm(join(sandboxFolder, name), { recursive: true, force: true });
  }
}
