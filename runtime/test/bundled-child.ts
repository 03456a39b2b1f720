/** A program for child processes of a test, bundled once: as TypeScript each of them would take seconds to start. */
import { mkdirSync, rmSync } from 'node:fs';
import { basename, join } from 'node:path';
import { buildSync } from 'esbuild';
import { projectRoot } from '../backend/agent-binary.ts';

export interface BundledChild {
  readonly path: string;
  remove(): void;
}

/** In the checkout, where it finds packages. @param workers Threads and processes that it starts, by name (scripts/worker-entries.mjs) */
export function bundledChild(source: URL, workers: Readonly<Record<string, URL>> = {}): BundledChild {
  const name = `${basename(source.pathname, '.ts')}-${process.pid}`;
  const folder = join(projectRoot(), 'dist/test', ...(Object.keys(workers).length > 0 ? [name] : []));
  mkdirSync(folder, { recursive: true });
  const path = join(folder, `${name}.mjs`);
  bundle(source, path, Object.keys(workers).length > 0);
  for (const [worker, entry] of Object.entries(workers)) bundle(entry, join(folder, `${worker}.mjs`), true);
  return {
    path,
    remove: () => rmSync(Object.keys(workers).length > 0 ? folder : path, { recursive: true, force: true }),
  };
}

/** `withWorkers`: those beside it are started, not their sources. */
function bundle(source: URL, path: string, withWorkers: boolean): void {
  buildSync({
    entryPoints: [source.pathname],
    outfile: path,
    bundle: true,
    ...(withWorkers ? { define: { DSEC_BUNDLED: 'true' } } : {}),
    platform: 'node',
    format: 'esm',
    packages: 'external',
    logLevel: 'error',
  });
}
