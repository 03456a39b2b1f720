/**
 * Bundles the project into dist/ for a fast start: one output file an entry, shared code in chunks beside them.
 *
 * Each build lives in a folder named by its content, is written under a temporary name and renamed, and the stamp that
 * points to it is replaced atomically: processes that build at the same time, or run an older build, do not meet.
 */
import { createHash } from 'node:crypto';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  readdirSync,
  renameSync,
  rmSync,
  statSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { basename, dirname, join, relative } from 'node:path';
import { fileState, stampPath } from './bundle-stamp.mjs';
import { workerEntries } from './worker-entries.mjs';

/** Packages that hold compiled code or look for files beside themselves: loaded from node_modules. */
const EXTERNAL = [
  'koffi',
  'lz4-napi',
  'fuse-native',
  'better-sqlite3',
  'pg',
  'esbuild',
  'tsx',
  'vitest',
  'benny',
  '@biomejs/biome',
  '*.node',
];

/** Files outside the module graph that decide what a build gives. */
const ALSO_INPUTS = [
  'package.json',
  'node_modules/.package-lock.json',
  'scripts/bundle.mjs',
  'scripts/bundle-stamp.mjs',
  'scripts/worker-entries.mjs',
];

/** CommonJS packages inside an ES module output still ask for these. */
const BANNER = [
  "import { createRequire as dsecCreateRequire } from 'node:module';",
  "import { fileURLToPath as dsecFileURLToPath } from 'node:url';",
  'const require = dsecCreateRequire(import.meta.url);',
  'const __filename = dsecFileURLToPath(import.meta.url);',
  "const __dirname = dsecFileURLToPath(new URL('.', import.meta.url));",
].join('\n');

const DAY_MS = 24 * 3600 * 1000;

/** Builds, finished or not; other folders in dist/ are other programs'. */
const BUILD_NAME = /^\.|-[0-9a-f]{16}$/;

/**
 * The entries of the bundle named `dsec`.
 * @param {string} root
 */
export function commandEntries(root) {
  return { dsec: join(root, 'control/cli/main.ts'), ...presentWorkers(root) };
}

/**
 * @param {string} root
 * @returns {Record<string, string>}
 */
export function presentWorkers(root) {
  const entries = Object.entries(workerEntries).map(([name, path]) => [name, join(root, path)]);
  return Object.fromEntries(entries.filter(([, path]) => existsSync(/** @type {string} */ (path))));
}

/**
 * Builds and publishes; returns the folder that holds `<entry>.mjs` for each entry.
 * @param {string} root
 * @param {string} name
 * @param {Record<string, string>} entries Output name -> source path.
 * @returns {Promise<string>}
 * @throws when a source does not compile (esbuild has printed where), or dist/ cannot be written (EACCES, EROFS, EPERM).
 */
export async function buildBundle(root, name, entries) {
  const dist = join(root, 'dist');
  // Not `recursive`: on a read-only file system that says ENOENT instead of EROFS.
  if (!existsSync(dist)) makeFolder(dist);
  // A folder that cannot be written should be known before the work, not after it.
  const staging = join(dist, `.${name}-${process.pid}-${Date.now().toString(36)}`);
  mkdirSync(staging);
  try {
    // States are taken before esbuild reads: a file that is edited meanwhile makes the next run build again.
    const before = sourceStates(root);
    const { build } = await import('esbuild');
    const result = await build({
      absWorkingDir: root,
      entryPoints: entries,
      outdir: staging,
      outExtension: { '.js': '.mjs' },
      bundle: true,
      splitting: true,
      // A tenth of a start is spent on reading what is loaded.
      minifyWhitespace: true,
      format: 'esm',
      platform: 'node',
      target: 'node20',
      chunkNames: 'chunk-[hash]',
      external: EXTERNAL,
      banner: { js: BANNER },
      define: { DSEC_BUNDLED: 'true' },
      sourcemap: 'linked',
      sourcesContent: false,
      legalComments: 'none',
      metafile: true,
      write: false,
      logLevel: 'warning',
    });
    const content = createHash('sha256');
    for (const file of [...result.outputFiles].sort((a, b) => (a.path < b.path ? -1 : 1))) {
      const fileName = basename(file.path);
      writeFileSync(join(staging, fileName), file.contents);
      // Source maps hold the temporary folder's depth, not its name: the content is the same whoever builds.
      content.update(fileName).update('\0').update(file.contents);
    }
    const folder = `${name}-${content.digest('hex').slice(0, 16)}`;
    // Whoever may read the sources may run what was built of them, whatever the umask of who built it.
    for (const name of readdirSync(staging)) chmodSync(join(staging, name), 0o644);
    chmodSync(staging, 0o755);
    publishFolder(staging, join(dist, folder));
    /** @type {Record<string, string>} */
    const files = {};
    for (const path of ALSO_INPUTS) files[path] = before.get(path) ?? fileState(join(root, path));
    for (const path of Object.keys(result.metafile.inputs)) {
      if (!path.includes('node_modules/')) files[path] = before.get(path) ?? 'appeared during the build';
    }
    for (const path of Object.values(workerEntries)) files[path] ??= before.get(path) ?? 'missing';
    publishFile(stampPath(root, name), JSON.stringify({ folder, files }));
    removeOldBuilds(dist, folder);
    return join(dist, folder);
  } finally {
    rmSync(staging, { recursive: true, force: true });
  }
}

/** @param {string} root */
function sourceStates(root) {
  /** @type {Map<string, string>} */
  const states = new Map();
  for (const path of ALSO_INPUTS) states.set(path, fileState(join(root, path)));
  /** @param {string} folder */
  const visit = (folder) => {
    for (const entry of readdirSync(folder, { withFileTypes: true })) {
      if (entry.name.startsWith('.') || entry.name === 'node_modules' || entry.name === 'dist') continue;
      const path = join(folder, entry.name);
      if (entry.isDirectory()) visit(path);
      else if (/\.(?:[cm]?[jt]s|json)$/.test(entry.name)) states.set(relative(root, path), fileState(path));
    }
  };
  visit(root);
  return states;
}

/** @param {string} path */
function makeFolder(path) {
  try {
    mkdirSync(path);
    chmodSync(path, 0o755);
  } catch (error) {
    // Another process may have just made it.
    if (!existsSync(path)) throw error;
  }
}

/** @param {string} staging @param {string} target */
function publishFolder(staging, target) {
  try {
    renameSync(staging, target);
  } catch (error) {
    // Somebody else published the same content first. Its age counts from now: it is in use again.
    if (!existsSync(target)) throw error;
    utimesSync(target, new Date(), new Date());
  }
}

/** @param {string} path @param {string} text */
function publishFile(path, text) {
  const temporary = join(dirname(path), `.${basename(path)}-${process.pid}`);
  writeFileSync(temporary, text);
  chmodSync(temporary, 0o644);
  renameSync(temporary, path);
}

/**
 * A running process may still load chunks of the build it started from: builds stay for a day.
 * @param {string} dist @param {string} current
 */
function removeOldBuilds(dist, current) {
  for (const entry of readdirSync(dist, { withFileTypes: true })) {
    if (!entry.isDirectory() || entry.name === current || !BUILD_NAME.test(entry.name)) continue;
    const path = join(dist, entry.name);
    try {
      if (Date.now() - statSync(path).mtimeMs > DAY_MS) rmSync(path, { recursive: true, force: true });
    } catch {
      // Another process is removing it.
    }
  }
}
