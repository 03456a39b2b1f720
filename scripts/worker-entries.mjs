/**
 * Every worker thread and background process of the project: name -> its TypeScript file, from the project's root.
 *
 * The bundler makes one output file `<name>.mjs` of each beside the command line's; `spawnWorker(name, ...)` and
 * `processEntry(name, ...)` in base/ find it there. A worker that is not in this list works from source only, so it has to be in it.
 */

/** @type {Readonly<Record<string, string>>} */
export const workerEntries = {
  'data-server-process': 'imagesvc/data-server/server-process.ts',
  'data-supervisor': 'imagesvc/data-server/supervisor-process.ts',
  'file-device': 'ublk-daemon/target/file/device-process.ts',
  'file-watch': 'ublk-daemon/target/file/watch-worker.ts',
  'layer-server-process': 'imagesvc/layer-server/layer-server-process.ts',
  'layer-server-worker': 'imagesvc/layer-server/layer-worker.ts',
  'layer-worker': 'converter/layer/layer-worker.ts',
  'raw-worker': 'imagesvc/data-server/raw-worker.ts',
  'ublk-queue': 'ublk-daemon/target/ublk/queue-worker.ts',
};
