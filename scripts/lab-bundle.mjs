/**
 * The tests of the lab as a bundle, built on this side: `<folder>.<name>.lab.mjs` of each, the worker threads, and the processes that the tests
 * start (`*-process.ts` beside them), and the command line: `dsec.mjs`.
 */
import { existsSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { freshBundle } from './bundle-stamp.mjs';

/** @param {string} root @returns {Promise<string>} Its folder. */
export async function bundleTests(root) {
  const entries = testEntries(root);
  // The entries are part of the name: a test that is added makes another bundle.
  const name = `lab-${Object.keys(entries).length}`;
  const fresh = freshBundle(root, name);
  if (fresh !== undefined) return fresh;
  const { buildBundle, presentWorkers } = await import('./bundle.mjs');
  return buildBundle(root, name, { ...entries, ...presentWorkers(root) });
}

/** @param {string} root */
function testEntries(root) {
  /** @type {Record<string, string>} */
  const entries = { dsec: join(root, 'control/cli/main.ts') };
  for (const folder of readdirSync(root, { withFileTypes: true })) {
    const tests = join(root, folder.name, 'test');
    if (!folder.isDirectory() || folder.name.startsWith('.') || !existsSync(tests)) continue;
    for (const file of readdirSync(tests)) {
      if (file.endsWith('.lab.ts')) entries[`${folder.name}.${file.slice(0, -'.ts'.length)}`] = join(tests, file);
      if (file.endsWith('-process.ts')) entries[file.slice(0, -'-process.ts'.length)] = join(tests, file);
    }
  }
  return entries;
}

/** What selects a test file by its path, as the name it has in the bundle. @param {string} word */
export function bundledName(word) {
  return word.replace('/test/', '.').replace(/\.lab\.ts$/, '.lab');
}
