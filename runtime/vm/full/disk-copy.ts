/**
 * Where a full machine's disk lies, and copies of it, which forks begin with. A copy lies beside the disk as `fork-*.qcow2`, and next to it what the firmware
 * remembers. Whoever asked for a copy removes its disk (control/runtime-service/fork-sandbox.ts); the rest goes with the next copy, or with the machine.
 */
import { constants, existsSync, mkdirSync } from 'node:fs';
import { copyFile, readdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { firmwareVariables } from '../qemu/arguments.ts';

const COPY = /^fork-.*\.qcow2$/;
const FIRMWARE_SUFFIX = '.uefi';

export function machineFolder(sandboxFolder: string): string {
  return join(sandboxFolder, 'machine');
}

export function diskPath(sandboxFolder: string): string {
  return join(sandboxFolder, 'disk.qcow2');
}

/** In a moment of it (../fork/moment.ts). */
export function diskCopyOf(momentFolder: string): string {
  return join(momentFolder, 'disk.qcow2');
}

/** Of a machine that stands still, to `path`. */
export async function copyOut(sandboxFolder: string, path: string): Promise<void> {
  await removeRests(sandboxFolder);
  await copyFile(diskPath(sandboxFolder), path, constants.COPYFILE_FICLONE);
  const variables = firmwareVariables(machineFolder(sandboxFolder));
  if (existsSync(variables)) await copyFile(variables, path + FIRMWARE_SUFFIX);
}

/** The copy at `path` becomes the disk of a machine that has not begun. */
export async function copyIn(path: string, sandboxFolder: string): Promise<void> {
  await copyFile(path, diskPath(sandboxFolder), constants.COPYFILE_FICLONE);
  if (!existsSync(path + FIRMWARE_SUFFIX)) return;
  const folder = machineFolder(sandboxFolder);
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  await copyFile(path + FIRMWARE_SUFFIX, firmwareVariables(folder));
}

/** Those of a service that was killed meanwhile: nobody else removes them. */
export async function removeCopies(sandboxFolder: string): Promise<void> {
  for (const name of await readdir(sandboxFolder)) {
    if (COPY.test(name)) await rm(join(sandboxFolder, name), { force: true });
  }
  await removeRests(sandboxFolder);
}

/** What a firmware remembers, of copies whose disk has been removed. */
async function removeRests(sandboxFolder: string): Promise<void> {
  const names = await readdir(sandboxFolder);
  for (const name of names.filter((one) => one.endsWith(FIRMWARE_SUFFIX))) {
    const disk = name.slice(0, -FIRMWARE_SUFFIX.length);
    if (COPY.test(disk) && !names.includes(disk)) await rm(join(sandboxFolder, name), { force: true });
  }
}
