/**
 * The tests that run in the lab (`npm run test:lab`): as root, on its kernel, one file after the other. They come bundled ($DSEC_LAB_BUNDLE):
 * emulated, learning TypeScript takes each process and thread of theirs seconds.
 */
import { basename, dirname } from 'node:path';
import { env } from 'node:process';
import { fileURLToPath } from 'node:url';

const bundle = env.DSEC_LAB_BUNDLE ?? '';

/**
 * Vitest gives the process of its tests a minute to begin, and has no setting for it: emulated, on a busy machine, that takes longer. This file
 * is read by the process that waits, not by the one with the tests.
 */
const VITEST_STARTS = new Set([60_000, 90_000]);
const START_MS = 600_000;
const { setTimeout } = globalThis;
/** @param {(...args: unknown[]) => void} work @param {number} ms @param {...unknown} rest */
const patient = (work, ms, ...rest) => setTimeout(work, VITEST_STARTS.has(ms) ? START_MS : ms, ...rest);
globalThis.setTimeout = /** @type {typeof setTimeout} */ (
  Object.defineProperties(patient, Object.getOwnPropertyDescriptors(setTimeout))
);

export default {
  root: dirname(bundle),
  cacheDir: '/lab/vite',
  test: {
    include: [`${basename(bundle)}/*.lab.mjs`],
    reporters: ['verbose', fileURLToPath(new URL('./totals-reporter.mjs', import.meta.url))],
    server: { deps: { external: [/\.mjs$/] } },
    pool: 'forks',
    maxWorkers: 1,
    // One process for all files: each start of one takes seconds.
    isolate: false,
    fileParallelism: false,
    testTimeout: 1_200_000,
    hookTimeout: 600_000,
  },
};
