/**
 * The command line of a process of our own whose code is one of our TypeScript files, bundled or not: what spawn-worker.ts
 * is for threads. Listed in scripts/worker-entries.mjs under the same name.
 */
import { fileURLToPath } from 'node:url';

declare const DSEC_BUNDLED: boolean | undefined;

/** Arguments for `process.execPath`, before the process's own. */
export function processEntry(name: string, entry: URL): string[] {
  if (typeof DSEC_BUNDLED !== 'undefined') return [fileURLToPath(new URL(`./${name}.mjs`, import.meta.url))];
  return [fileURLToPath(new URL('./worker-boot.mjs', import.meta.url)), entry.href];
}
