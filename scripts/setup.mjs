/**
 * Makes this checkout ready to run: Node's version, npm packages, tools from apt. Says what it installs and why; where it may
 * not (no root, no apt), says exactly what is missing and what to type, and goes on where it can. Quiet when all is there.
 *
 *     node scripts/setup.mjs          what `npm start` needs
 *     node scripts/setup.mjs test     what `npm test` needs as well
 *     node scripts/setup.mjs lab      and what the kernel lab needs (bench/lab/)
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { accessSync, constants, existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { delimiter, dirname, join } from 'node:path';
import { argv, env, exit, getuid, stderr, versions } from 'node:process';
import { fileURLToPath } from 'node:url';
import { buildAgent } from './agent-build.mjs';
import { buildNative } from './native.mjs';

export const root = dirname(dirname(fileURLToPath(import.meta.url)));

const OLDEST_NODE = [20, 18, 1];

/** For tools that no package of the system has. */
const toolsFolder = join(homedir(), '.cache/dsec/tools');
/** Building one may take minutes on a small machine; it must not take for ever. */
const GO_TIMEOUT_MS = 15 * 60_000;

/** Each needs what those before it need. @typedef {'start' | 'test' | 'lab'} Purpose */
const PURPOSES = /** @type {const} */ (['start', 'test', 'lab']);

/**
 * @typedef {object} Tool
 * @property {string} package apt package, or a name for what is built with `go`.
 * @property {string} [go] Not in apt: a Go package to build into ~/.cache/dsec/tools, where Go is.
 * @property {readonly string[]} probe Any of these: a command on the PATH, or with a slash a file (`*` for anything but a slash).
 * @property {string} why
 * @property {Purpose} neededFor
 * @property {boolean} [optional] Works without it, only slower or less.
 */

/** @type {readonly Tool[]} */
export const tools = [
  { package: 'crun', probe: ['crun', 'runc'], why: 'runs containers', neededFor: 'start' },
  {
    package: 'busybox-static',
    probe: ['/bin/busybox', '/usr/bin/busybox'],
    why: 'the base image that the main job makes',
    neededFor: 'start',
  },
  { package: 'git', probe: ['git'], why: 'the workspace image that the main job makes', neededFor: 'start' },
  {
    package: 'libisal2',
    probe: ['/usr/lib/*/libisal.so.2', '/usr/lib/libisal.so.2', '/usr/lib64/libisal.so.2'],
    why: 'inflates layers faster',
    neededFor: 'start',
    optional: true,
  },
  {
    package: 'rustc',
    probe: ['rustc', join(homedir(), '.cargo/bin/rustc')],
    why: 'builds dsec-agent, the fast launcher of sandboxes, and a faster sha256 and gunzip; crun and Node do without',
    neededFor: 'start',
    optional: true,
  },
  {
    package: 'nftables',
    probe: ['nft', '/usr/sbin/nft'],
    why: 'networks of sandboxes with a policy',
    neededFor: 'start',
    optional: true,
  },
  ...[
    { package: 'g++', probe: ['g++'] },
    { package: 'make', probe: ['make'] },
    { package: 'python3', probe: ['python3'] },
  ].map((tool) => ({
    ...tool,
    why: 'builds better-sqlite3, the database of accounts and quotas; PostgreSQL does without',
    neededFor: /** @type {const} */ ('start'),
    optional: true,
  })),
  // Once more: what builds a package may be missing, what tests run may not.
  { package: 'python3', probe: ['python3'], why: 'runs the image cases', neededFor: 'test' },
  {
    package: 'postgresql',
    probe: ['/usr/lib/postgresql/*/bin/initdb', 'initdb'],
    why: 'tests of accounts and quotas on PostgreSQL',
    neededFor: 'test',
    optional: true,
  },
  {
    package: 'libfuse2',
    probe: ['/usr/lib/*/libfuse.so.2', '/lib/*/libfuse.so.2', '/usr/lib64/libfuse.so.2'],
    why: 'tests of the portable FUSE transport',
    neededFor: 'test',
  },
  {
    package: 'musl-tools',
    probe: ['musl-gcc'],
    why: 'tests on an image of musl',
    neededFor: 'test',
    optional: true,
  },
  { package: 'skopeo', probe: ['skopeo'], why: 'tests against its images and transports', neededFor: 'test' },
  { package: 'umoci', probe: ['umoci'], why: 'tests against how it unpacks images', neededFor: 'test' },
  { package: 'docker-registry', probe: ['docker-registry'], why: 'tests against a real registry', neededFor: 'test' },
  { package: 'erofs-utils', probe: ['fsck.erofs'], why: 'tests that its fsck accepts our images', neededFor: 'test' },
  { package: 'zstd', probe: ['zstd'], why: 'tests make zstd layers', neededFor: 'test' },
  {
    package: 'chromium',
    probe: ['chromium', 'chromium-browser', 'google-chrome'],
    why: 'tests of the console in a browser',
    neededFor: 'test',
    optional: true,
  },
  { package: 'qemu-utils', probe: ['qemu-img'], why: 'tests of the NBD server', neededFor: 'test', optional: true },
  {
    package: 'ovmf',
    probe: ['/usr/share/OVMF/OVMF_CODE_4M.fd'],
    why: 'full machines that boot by UEFI',
    neededFor: 'test',
    optional: true,
  },
  { package: 'libnbd-bin', probe: ['nbdinfo'], why: 'tests of the NBD server', neededFor: 'test', optional: true },
  { package: 'fio', probe: ['fio'], why: 'tests of the NBD server', neededFor: 'test', optional: true },
  {
    package: 'versitygw',
    go: 'github.com/versity/versitygw/cmd/versitygw@v1.8.0',
    probe: [join(toolsFolder, 'versitygw'), 'versitygw'],
    why: 'tests against a real S3 server',
    neededFor: 'test',
    optional: true,
  },
  ...[
    { package: 'qemu-system-x86', probe: ['qemu-system-x86_64'] },
    { package: 'cpio', probe: ['cpio'] },
    { package: 'xz-utils', probe: ['xz'] },
    { package: 'kmod', probe: ['depmod'] },
    { package: 'e2fsprogs', probe: ['mkfs.ext4'] },
    { package: 'nbd-client', probe: ['nbd-client'] },
    { package: 'apparmor', probe: ['apparmor_parser', '/usr/sbin/apparmor_parser'] },
  ].map((tool) => ({
    ...tool,
    why: 'the kernel lab, and sandboxes in virtual machines',
    neededFor: /** @type {const} */ ('lab'),
    optional: true,
  })),
];

/** What must be at hand when everything is: `fail` ends the process with one clear message. @param {string} message @returns {never} */
function fail(message) {
  stderr.write(`${message}\n`);
  exit(1);
}

/** @param {string} text */
function say(text) {
  stderr.write(`${text}\n`);
}

/**
 * @param {Purpose} purpose
 * @returns {{ missing: Tool[] }} Tools that could not be installed.
 */
export function setup(purpose) {
  checkNode();
  // Before the packages: some build something.
  const missing = installTools(purpose);
  installPackages();
  buildAgent(root, say);
  buildNative(root, say);
  return { missing };
}

function checkNode() {
  const have = versions.node.split('.').map(Number);
  for (let i = 0; i < 3; i++) {
    const difference = /** @type {number} */ (have[i]) - /** @type {number} */ (OLDEST_NODE[i]);
    if (difference > 0) return;
    if (difference < 0) fail(`dsec needs Node ${OLDEST_NODE.join('.')} or newer; this is ${versions.node}.`);
  }
}

/** Present and installed from this very lock file. */
function installPackages() {
  const lock = readOrEmpty(join(root, 'package-lock.json'));
  const state = createHash('sha256')
    .update(lock)
    .update(readOrEmpty(join(root, 'package.json')))
    .update(`node ${versions.modules}`)
    .digest('hex');
  const stamp = join(root, 'node_modules', '.dsec-setup');
  if (readOrEmpty(stamp).toString() === state) return;
  const installed = readOrEmpty(join(root, 'node_modules', '.package-lock.json'));
  if (installed.length === 0 || !sameVersions(lock, installed)) {
    say('Installing npm packages (npm ci)');
    if (npm('ci') !== 0) {
      // Not in sync with package.json: a checkout in the middle of a change. Let npm put it right.
      say('npm ci failed; trying npm install');
      if (npm('install') !== 0) fail('The npm packages could not be installed: see the messages above.');
    }
  }
  try {
    const after = createHash('sha256')
      .update(readOrEmpty(join(root, 'package-lock.json')))
      .update(readOrEmpty(join(root, 'package.json')));
    writeFileSync(stamp, after.update(`node ${versions.modules}`).digest('hex'));
  } catch {
    // A read-only checkout with its packages in place: nothing to remember it in.
  }
}

/**
 * Whether every package that is installed has the version of the lock file. Packages for other platforms are not installed.
 * @param {Buffer} lock @param {Buffer} installed
 */
function sameVersions(lock, installed) {
  try {
    /** @type {Record<string, { version?: string, optional?: boolean }>} */
    const wanted = JSON.parse(lock.toString()).packages;
    /** @type {Record<string, { version?: string }>} */
    const present = JSON.parse(installed.toString()).packages;
    return Object.entries(wanted).every(([path, { version, optional }]) => {
      if (path === '') return true;
      const have = present[path];
      return have === undefined ? optional === true : have.version === version;
    });
  } catch {
    return false;
  }
}

/** @param {string} command */
function npm(command) {
  // Output on stderr: stdout belongs to whoever runs us, `npm start -- --json` for one.
  return spawnSync('npm', [command, '--no-fund', '--no-audit'], { cwd: root, stdio: ['ignore', 2, 2] }).status;
}

/**
 * @param {Purpose} purpose
 * @returns {Tool[]}
 */
export function missingTools(purpose) {
  return tools.filter(
    (tool) => PURPOSES.indexOf(tool.neededFor) <= PURPOSES.indexOf(purpose) && !tool.probe.some(present),
  );
}

/** @param {string} probe */
function present(probe) {
  if (!probe.includes('/')) {
    const folders = [...(env.PATH ?? '').split(delimiter), '/usr/sbin', '/sbin', '/usr/local/sbin'];
    return folders.some((folder) => folder !== '' && executable(join(folder, probe)));
  }
  const star = probe.indexOf('*');
  if (star < 0) return existsSync(probe);
  const above = probe.slice(0, probe.lastIndexOf('/', star));
  const rest = probe.slice(probe.indexOf('/', star) + 1);
  try {
    return readdirSync(above).some((name) => existsSync(join(above, name, rest)));
  } catch {
    return false;
  }
}

/** @param {string} path */
function executable(path) {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/**
 * @param {Purpose} purpose
 * @returns {Tool[]}
 */
function installTools(purpose) {
  const unbuilt = missingTools(purpose).filter((tool) => tool.go !== undefined && !build(tool));
  return [...installFromApt(purpose), ...unbuilt];
}

/** @param {Tool} tool @returns {boolean} Whether it is there now. */
function build(tool) {
  const go = ['go', '/usr/local/go/bin/go'].find(present);
  if (go === undefined) {
    say(`${tool.package} (${tool.why}) is missing, and there is no Go to build it with: those tests are skipped.`);
    return false;
  }
  const source = /** @type {string} */ (tool.go);
  say(`Building ${source} with Go into ${toolsFolder}, once: ${tool.why} (a few minutes)`);
  const built = spawnSync(go, ['install', source], {
    cwd: homedir(),
    stdio: ['ignore', 2, 2],
    env: { ...env, GOBIN: toolsFolder, GOFLAGS: '-mod=mod' },
    timeout: GO_TIMEOUT_MS,
  });
  if (built.status === 0) return true;
  say(`${tool.package} could not be built (see above): tests that need it are skipped.`);
  return false;
}

/**
 * @param {Purpose} purpose
 * @returns {Tool[]}
 */
function installFromApt(purpose) {
  const apart = (/** @type {Tool[]} */ some) => some.filter((tool) => tool.go === undefined);
  const missing = apart(missingTools(purpose));
  if (missing.length === 0) return [];
  const names = missing.map((tool) => tool.package);
  const command = `apt-get install -y --no-install-recommends ${names.join(' ')}`;
  const list = missing
    .map((tool) => `  ${tool.package.padEnd(16)} ${tool.why}${tool.optional ? ' (optional)' : ''}`)
    .join('\n');
  const apt = present('apt-get');
  if (!apt || getuid?.() !== 0) {
    say(`Missing tools:\n${list}`);
    say(
      apt
        ? `Not root, so not installed. Type: sudo ${command}`
        : 'There is no apt-get here. Install these with the package manager of this system.',
    );
    return missing;
  }
  say(`Installing with apt-get:\n${list}`);
  if (aptGet('install', '-y', '--no-install-recommends', ...names) !== 0) {
    // No package lists yet, or old ones.
    aptGet('update');
    if (aptGet('install', '-y', '--no-install-recommends', ...names) !== 0) {
      // One that this release does not have must not keep the others out.
      for (const name of names) aptGet('install', '-y', '--no-install-recommends', name);
    }
  }
  const still = apart(missingTools(purpose));
  if (still.length > 0)
    say(`Could not be installed: ${still.map((tool) => tool.package).join(', ')}. Going on without.`);
  return still;
}

/** @param {string[]} args */
function aptGet(...args) {
  const quiet = ['-q', '-o', 'Dpkg::Use-Pty=0'];
  return spawnSync('apt-get', [...quiet, ...args], {
    stdio: ['ignore', 2, 2],
    env: { ...env, DEBIAN_FRONTEND: 'noninteractive' },
  }).status;
}

/** @param {string} path */
function readOrEmpty(path) {
  try {
    return readFileSync(path);
  } catch {
    return Buffer.alloc(0);
  }
}

if (argv[1] === fileURLToPath(import.meta.url)) {
  const { missing } = setup(PURPOSES.find((purpose) => purpose === argv[2]) ?? 'start');
  exit(missing.every((tool) => tool.optional) ? 0 : 1);
}
