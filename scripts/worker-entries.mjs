/**
 * Every worker thread of the project: name -> its TypeScript file, from the project's root.
 *
 * The bundler makes one output file `<name>.mjs` of each beside the command line's; `spawnWorker(name, ...)` in base/
 * finds it there. A worker that is not in this list works from source only, so it has to be in it.
 */

/** @type {Readonly<Record<string, string>>} */
export const workerEntries = {
  'layer-worker': 'converter/layer/layer-worker.ts',
};
