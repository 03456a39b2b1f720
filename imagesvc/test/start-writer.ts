/** Starts store-writer.ts as a process of its own, bundled once so that it starts fast. */
import { type ChildProcess, spawn } from 'node:child_process';
import { renameSync } from 'node:fs';
import { join } from 'node:path';
import { buildSync } from 'esbuild';

let bundle: string | undefined;

/** Where the bundle is; below node_modules, so that it finds packages. */
export function writerPath(): string {
  if (bundle === undefined) {
    const root = join(import.meta.dirname, '../..');
    const folder = join(root, 'node_modules/.cache/dsec-test');
    const made = join(folder, `store-writer-${process.pid}.mjs`);
    buildSync({
      entryPoints: [join(import.meta.dirname, 'store-writer.ts')],
      outfile: made,
      bundle: true,
      platform: 'node',
      format: 'esm',
      packages: 'external',
      // `#base` and the like are ours, not packages.
      alias: Object.fromEntries(
        ['base', 'linux', 'converter'].map((name) => [`#${name}`, join(root, name, 'index.ts')]),
      ),
      logLevel: 'error',
    });
    bundle = join(folder, 'store-writer.mjs');
    renameSync(made, bundle);
  }
  return bundle;
}

export function startWriter(...args: string[]): ChildProcess {
  return spawn(process.execPath, [writerPath(), ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
}
