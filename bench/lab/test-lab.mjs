/**
 * `npm run test:lab [-- --emulate] [vitest arguments]`: runs the tests named *.lab.ts in the lab. Where there can be no lab it says why, and
 * ends with 0 unless DSEC_LAB=required.
 */
import { spawnSync } from 'node:child_process';
import { dirname } from 'node:path';
import { argv, env, execPath, exit } from 'node:process';
import { fileURLToPath } from 'node:url';
import { LabUnavailable, quoted, runInLab } from './lab.mjs';

const root = dirname(dirname(dirname(fileURLToPath(import.meta.url))));
// Says itself what is missing.
spawnSync(execPath, ['scripts/setup.mjs', 'start'], { cwd: root, stdio: 'inherit' });
const emulate = argv.includes('--emulate');
const words = argv.slice(2).filter((word) => word !== '--emulate');
const command = ['node', 'node_modules/vitest/vitest.mjs', 'run', '--config', 'bench/lab/vitest.config.ts', ...words];
const ending = new AbortController();
for (const signal of /** @type {const} */ (['SIGINT', 'SIGTERM', 'SIGHUP'])) process.once(signal, () => ending.abort());
try {
  exit(
    await runInLab(command.map(quoted).join(' '), {
      cwd: root,
      emulate,
      timeoutMs: 30 * 60_000,
      signal: ending.signal,
    }),
  );
} catch (error) {
  if (ending.signal.aborted) exit(130);
  if (!(error instanceof LabUnavailable)) throw error;
  console.log(`skipped: ${error.message}`);
  exit(env.DSEC_LAB === 'required' ? 1 : 0);
}
