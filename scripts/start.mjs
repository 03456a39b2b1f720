/**
 * `npm start [-- SOURCE] [--json]`: makes the checkout ready, then shows the whole line once: converts images, mounts them,
 * runs a command in a sandbox, packs what it changed, verifies. The work itself is `dsec main-job`.
 */
import { spawn } from 'node:child_process';
import { join } from 'node:path';
import { argv, execPath, exit } from 'node:process';
import { root, setup } from './setup.mjs';

setup('start');
// Some ways of calling npm pass their own `--` on.
const args = argv.slice(2).filter((arg, i) => i > 0 || arg !== '--');
const child = spawn(execPath, [join(root, 'bin/dsec'), 'main-job', ...args], { stdio: 'inherit' });
// The terminal sends Ctrl-C to the child as well, which cleans up; we only wait for it.
for (const signal of /** @type {const} */ (['SIGINT', 'SIGTERM', 'SIGHUP'])) {
  process.on(signal, () => {
    if (signal !== 'SIGINT') child.kill(signal);
  });
}
child.on('error', (error) => {
  console.error(`npm start: ${error.message}`);
  exit(1);
});
child.on('exit', (code, signal) => exit(code ?? (signal === 'SIGINT' ? 130 : 1)));
