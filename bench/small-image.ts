/**
 * An ordinary image to start things from: a static busybox as its first layer, then three layers of this machine's files, about
 * 120 MB compressed. Nothing in it needs a network or a registry.
 */
import { copyFileSync, existsSync, mkdirSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import { writeLayout } from './image-layout.ts';
import { type MachineLayer, machineLayers, writeLayer } from './machine-layers.ts';
import { numberOption } from './options.ts';

const APPLETS = ['sh', 'echo', 'ls', 'cat', 'true'];
/** Container runtimes mount onto these. */
const FOLDERS = ['/bin', '/dev', '/etc', '/proc', '/sys', '/tmp'];

export function busyboxMissing(): string | undefined {
  return findBusybox() === undefined ? 'a static busybox is missing (apt-get install busybox-static)' : undefined;
}

export function findBusybox(): string | undefined {
  return ['/bin/busybox', '/usr/bin/busybox'].find((path) => existsSync(path));
}

export interface SmallImage {
  /** `FOLDER:TAG`, to be put behind `oci:`. */
  readonly layout: string;
  readonly layers: readonly MachineLayer[];
}

export async function writeSmallImage(folder: string): Promise<SmallImage> {
  const layers = [await busyboxLayer(folder), ...(await machineLayers(3, numberOption('mb', 40)))];
  return { layout: writeLayout(join(folder, 'layout'), 'small', layers, ['sh']), layers };
}

/** A layer with a shell, and where container runtimes mount. */
export function busyboxLayer(folder: string, applets: readonly string[] = APPLETS): Promise<MachineLayer> {
  const root = join(folder, 'busybox');
  for (const path of FOLDERS) mkdirSync(join(root, path), { recursive: true });
  copyFileSync(findBusybox()!, join(root, 'bin/busybox'));
  for (const applet of applets) symlinkSync('busybox', join(root, 'bin', applet));
  const paths = [...FOLDERS, '/bin/busybox', ...applets.map((applet) => `/bin/${applet}`)].sort();
  return writeLayer(paths, join(folder, 'busybox.tar.gz'), root);
}
