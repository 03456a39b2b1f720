/** A program for child processes of a test, bundled once: as TypeScript each of them would take seconds to start. */
import { mkdirSync, rmSync } from 'node:fs';
import { basename, join } from 'node:path';
import { buildSync } from 'esbuild';
import { projectRoot } from '../backend/agent-binary.ts';

export interface BundledChild {
  readonly path: string;
  remove(): void;
}

/** In the checkout, where it finds packages. */
export function bundledChild(source: URL): BundledChild {
  const folder = join(projectRoot(), 'dist/test');
  mkdirSync(folder, { recursive: true });
  const path = join(folder, `${basename(source.pathname, '.ts')}-${process.pid}.mjs`);
  buildSync({
    entryPoints: [source.pathname],
    outfile: path,
    bundle: true,
    platform: 'node',
    format: 'esm',
    packages: 'external',
    logLevel: 'error',
  });
  return { path, remove: () => rmSync(path, { force: true }) };
}
