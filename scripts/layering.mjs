/**
 * Holds the folders to their order: who may import whom, and only through the other folder's door.
 *
 *     bench -> control -> runtime -> imagesvc -> converter
 *                     runtime -> ublk-daemon; imagesvc, ublk-daemon -> chunk-cache; all -> linux -> base
 *
 * Another folder is imported as `#name`, its index.ts; a relative import never leaves its top-level folder. Type imports
 * count like any other. Run it alone with `node scripts/layering.mjs`.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join, posix, relative, sep } from 'node:path';
import { argv } from 'node:process';
import { fileURLToPath } from 'node:url';
import { findImports } from './imports.mjs';

/** Folder -> the folders it may import. @type {Readonly<Record<string, readonly string[]>>} */
export const allowed = {
  base: [],
  linux: ['base'],
  converter: ['base', 'linux'],
  'chunk-cache': ['base', 'linux'],
  'ublk-daemon': ['base', 'linux', 'chunk-cache'],
  imagesvc: ['base', 'linux', 'chunk-cache', 'converter'],
  runtime: ['base', 'linux', 'chunk-cache', 'converter', 'imagesvc', 'ublk-daemon'],
  control: ['base', 'linux', 'chunk-cache', 'converter', 'imagesvc', 'ublk-daemon', 'runtime'],
  bench: ['base', 'linux', 'chunk-cache', 'converter', 'imagesvc', 'ublk-daemon', 'runtime', 'control'],
};

/** @typedef {{ path: string, line: number, problem: string }} Violation */

/**
 * Violations of one file.
 * @param {string} path From the root, with `/`.
 * @param {string} source
 * @returns {Violation[]}
 */
export function checkFile(path, source) {
  const folder = /** @type {string} */ (path.split('/')[0]);
  /** @type {Violation[]} */
  const violations = [];
  for (const { specifier, line } of findImports(source)) {
    const problem = problemWith(path, folder, specifier);
    if (problem !== undefined) violations.push({ path, line, problem });
  }
  return violations;
}

/** @param {string} path @param {string} folder @param {string} specifier */
function problemWith(path, folder, specifier) {
  if (specifier.startsWith('#')) {
    const name = specifier.slice(1);
    if (name.includes('/')) return `'${specifier}': a folder's only door is its index.ts, '#${name.split('/')[0]}'`;
    if (allowed[name] === undefined) return `'${specifier}': no such folder`;
    // Through its own door a file would import itself in a circle; a test may look at the door.
    if (name === folder) return isTest(path) ? undefined : `'${specifier}': inside a folder, import the file itself`;
    if (!allowed[folder]?.includes(name)) return `${folder} must not import ${name}`;
    return undefined;
  }
  if (specifier.startsWith('.')) {
    const target = posix.normalize(posix.join(posix.dirname(path), specifier.replace(/[?#].*$/, '')));
    if (target.split('/')[0] !== folder) return `'${specifier}' leaves ${folder}/: import '#name' of the other folder`;
    return undefined;
  }
  if (specifier.startsWith('/') || specifier.startsWith('file:')) return `'${specifier}': an absolute path`;
  return undefined;
}

/** @param {string} path */
function isTest(path) {
  return path.includes('/test/') || path.endsWith('.test.ts');
}

/**
 * Violations of the whole project, in order of path and line.
 * @param {string} root
 * @returns {Violation[]}
 */
export function checkLayering(root) {
  /** @type {Violation[]} */
  const violations = [];
  /** @param {string} folder */
  const visit = (folder) => {
    for (const entry of readdirSync(folder, { withFileTypes: true }).sort((a, b) => (a.name < b.name ? -1 : 1))) {
      const path = join(folder, entry.name);
      if (entry.isDirectory()) {
        if (entry.name !== 'node_modules') visit(path);
      } else if (/\.[cm]?[jt]sx?$/.test(entry.name)) {
        violations.push(...checkFile(relative(root, path).split(sep).join('/'), readFileSync(path, 'utf8')));
      }
    }
  };
  const present = new Set(readdirSync(root));
  for (const folder of Object.keys(allowed)) if (present.has(folder)) visit(join(root, folder));
  return violations;
}

/** @param {Violation} violation */
export function violationText({ path, line, problem }) {
  return `${path}:${line}: ${problem}`;
}

if (argv[1] === fileURLToPath(import.meta.url)) {
  const violations = checkLayering(dirname(dirname(fileURLToPath(import.meta.url))));
  for (const violation of violations) console.error(violationText(violation));
  process.exitCode = violations.length === 0 ? 0 : 1;
}
