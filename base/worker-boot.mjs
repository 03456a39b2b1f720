/**
 * First file of every worker thread that runs from source: a worker cannot start in a .ts file, so this one teaches the
 * thread TypeScript and goes on with the file named in its first argument. See spawn-worker.ts.
 */
import { register } from 'tsx/esm/api';

const [entry] = process.argv.splice(2, 1);
register();
await import(/** @type {string} */ (entry));
