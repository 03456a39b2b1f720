/** `npm run check`: types, lint and format, and the order of the folders. Everything runs, whatever fails first. */
import { spawnSync } from 'node:child_process';
import { argv, exit } from 'node:process';
import { fileURLToPath } from 'node:url';
import { checkLayering, violationText } from './layering.mjs';
import { root } from './setup.mjs';

/** @returns {string[]} Names of the checks that failed. */
export function check() {
  const failed = [];
  for (const [name, ...command] of [
    ['types', 'node_modules/.bin/tsc', '--pretty', 'false'],
    // What runs in a browser knows other globals.
    ['types of the console', 'node_modules/.bin/tsc', '--pretty', 'false', '-p', 'control/console'],
    ['biome', 'node_modules/.bin/biome', 'check', '.'],
  ]) {
    const started = performance.now();
    const { status, error } = spawnSync(/** @type {string} */ (command[0]), command.slice(1), {
      cwd: root,
      stdio: ['ignore', 'inherit', 'inherit'],
    });
    if (error !== undefined) console.error(`${name}: ${error.message}`);
    report(/** @type {string} */ (name), status === 0, started);
    if (status !== 0) failed.push(name);
  }
  const started = performance.now();
  const violations = checkLayering(root);
  for (const violation of violations) console.error(violationText(violation));
  report('layering', violations.length === 0, started);
  if (violations.length > 0) failed.push('layering');
  return /** @type {string[]} */ (failed);
}

/** @param {string} name @param {boolean} ok @param {number} started */
function report(name, ok, started) {
  console.log(`check ${name}: ${ok ? 'ok' : 'FAILED'} (${((performance.now() - started) / 1000).toFixed(1)} s)`);
}

if (argv[1] === fileURLToPath(import.meta.url)) exit(check().length === 0 ? 0 : 1);
