/**
 * Starts a worker thread whose code is one of our TypeScript files, bundled or not.
 *
 * In a bundle every output lies in one folder, so the worker's file is beside this code. From source (tests, tsx, a
 * checkout that cannot be written) the thread starts in worker-boot.mjs, since Node loads no .ts as a thread's first file.
 */
import { Worker, type WorkerOptions } from 'node:worker_threads';

declare const DSEC_BUNDLED: boolean | undefined;

/**
 * @param name As listed in scripts/worker-entries.mjs.
 * @param entry The worker's TypeScript file: `new URL('./layer-worker.ts', import.meta.url)`.
 * @param options As for `Worker`. Flags of this process are not inherited: loaders of a test runner have no business there.
 */
export function spawnWorker(name: string, entry: URL, options: WorkerOptions = {}): Worker {
  const execArgv = options.execArgv ?? [];
  if (typeof DSEC_BUNDLED !== 'undefined') {
    return new Worker(new URL(`./${name}.mjs`, import.meta.url), { name, ...options, execArgv });
  }
  const argv = [entry.href, ...(options.argv ?? [])];
  return new Worker(new URL('./worker-boot.mjs', import.meta.url), { name, ...options, execArgv, argv });
}
