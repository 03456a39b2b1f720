/**
 * The data server's two processes as a user has them, bundled: from source they would spend seconds on TypeScript each time
 * one of them is killed.
 */
import { mkdirSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import type { DataServerPrograms } from '../data-server/data-server.ts';

const PROJECT = fileURLToPath(new URL('../..', import.meta.url));

/** Builds into `folder`. */
export async function bundlePrograms(folder: string): Promise<DataServerPrograms> {
  mkdirSync(folder, { recursive: true });
  symlinkSync(join(PROJECT, 'node_modules'), join(folder, 'node_modules'));
  const source = (name: string) => join(PROJECT, 'imagesvc/data-server', name);
  await build({
    absWorkingDir: PROJECT,
    entryPoints: {
      'data-supervisor': source('supervisor-process.ts'),
      'data-server-process': source('server-process.ts'),
      'raw-worker': source('raw-worker.ts'),
      'layer-server-process': source('../layer-server/layer-server-process.ts'),
      'layer-server-worker': source('../layer-server/layer-worker.ts'),
    },
    outdir: folder,
    outExtension: { '.js': '.mjs' },
    bundle: true,
    splitting: true,
    format: 'esm',
    platform: 'node',
    target: 'node20',
    external: ['koffi', 'lz4-napi', 'fuse-native', 'tsx', '*.node'],
    banner: {
      js: "import { createRequire as madeRequire } from 'node:module';\nconst require = madeRequire(import.meta.url);",
    },
    define: { DSEC_BUNDLED: 'true' },
    logLevel: 'warning',
  });
  return {
    supervisor: [join(folder, 'data-supervisor.mjs')],
    server: [join(folder, 'data-server-process.mjs')],
    layers: [join(folder, 'layer-server-process.mjs')],
  };
}
