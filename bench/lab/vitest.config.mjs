/**
 * The tests that run in the lab (`npm run test:lab`): as root, on its kernel, one file after the other. They come bundled ($DSEC_LAB_BUNDLE):
 * emulated, learning TypeScript takes each process and thread of theirs seconds.
 */
import { basename, dirname } from 'node:path';
import { env } from 'node:process';
import { fileURLToPath } from 'node:url';

const bundle = env.DSEC_LAB_BUNDLE ?? '';

export default {
  root: dirname(bundle),
  cacheDir: '/lab/vite',
  test: {
    include: [`${basename(bundle)}/*.lab.mjs`],
    reporters: ['verbose', fileURLToPath(new URL('./totals-reporter.mjs', import.meta.url))],
    server: { deps: { external: [/\.mjs$/] } },
    pool: 'forks',
    maxWorkers: 1,
    // One process for all files: each start of one takes seconds, and vitest waits for it a minute and no longer.
    isolate: false,
    fileParallelism: false,
    testTimeout: 1_200_000,
    hookTimeout: 600_000,
  },
};
