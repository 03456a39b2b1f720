/**
 * Builds runtime/agent into dist/agent/dsec-agent with a bare rustc: no cargo, no crates, nothing from the network. Beside it
 * lies what it was built from (`dsec-agent.json`): the hash of the sources, which the program also carries inside, and the state
 * of each file. Both are replaced atomically; whoever runs the old program goes on with it.
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { homedir } from 'node:os';
import { delimiter, join } from 'node:path';
import { env } from 'node:process';
import { fileState } from './bundle-stamp.mjs';

const FOLDER = 'runtime/agent';
const PROGRAM = 'dist/agent/dsec-agent';
const TIMEOUT_MS = 5 * 60_000;

/** Small, static, without unwinding. The oldest compiler that takes all of it is Debian 12's 1.63. */
const FLAGS = [
  ...['--edition', '2021', '--crate-name', 'dsec_agent', '--crate-type', 'bin'],
  ...['-C', 'target-feature=+crt-static', '-C', 'relocation-model=static'],
  ...['-C', 'opt-level=s', '-C', 'panic=abort', '-C', 'lto=fat', '-C', 'codegen-units=1'],
  ...['-C', 'strip=symbols', '-C', 'link-arg=-Wl,--gc-sections'],
];

/** Path of the compiler, where there is one. @returns {string | undefined} */
export function findRustc() {
  const folders = [...(env.PATH ?? '').split(delimiter), join(homedir(), '.cargo/bin'), '/usr/bin', '/usr/local/bin'];
  return folders
    .filter((folder) => folder !== '')
    .map((folder) => join(folder, 'rustc'))
    .find((path) => existsSync(path));
}

/** @param {string} root @returns {string[]} Paths from the root, sorted. */
function sources(root) {
  const files = readdirSync(join(root, FOLDER, 'src'), { recursive: true, encoding: 'utf8' }).filter((name) =>
    name.endsWith('.rs'),
  );
  return [...files.map((name) => `${FOLDER}/src/${name}`), `${FOLDER}/Cargo.toml`].sort();
}

/**
 * `fresh`: it is there, built of these sources.
 * @param {string} root
 */
export function agentBuildState(root) {
  const hash = createHash('sha256').update(FLAGS.join(' '));
  /** @type {Record<string, string>} */
  const files = {};
  for (const path of sources(root)) {
    files[path] = fileState(join(root, path));
    hash
      .update(path)
      .update('\0')
      .update(readFileSync(join(root, path)));
  }
  const build = hash.digest('hex').slice(0, 16);
  return { build, files, fresh: builtFrom(root) === build };
}

/** @param {string} root @returns {string | undefined} */
function builtFrom(root) {
  try {
    return existsSync(join(root, PROGRAM))
      ? JSON.parse(readFileSync(join(root, `${PROGRAM}.json`), 'utf8')).build
      : undefined;
  } catch {
    return undefined;
  }
}

/**
 * Builds it when it is missing or old.
 * @param {string} root
 * @param {(text: string) => void} say
 * @param {string | undefined} [rustc]
 * @returns {boolean} Whether it is there now.
 */
export function buildAgent(root, say, rustc = findRustc()) {
  const { build, files, fresh } = agentBuildState(root);
  const folder = join(root, 'dist/agent');
  const stamp = () => {
    writeFileSync(join(folder, `.stamp-${process.pid}`), JSON.stringify({ build, files }));
    renameSync(join(folder, `.stamp-${process.pid}`), join(root, `${PROGRAM}.json`));
  };
  const staging = join(folder, `.dsec-agent-${process.pid}`);
  try {
    if (fresh) {
      // The same bytes with other times: a checkout of another branch and back.
      stamp();
      return true;
    }
    if (rustc === undefined) return false;
    say('Building dsec-agent, the launcher of sandboxes, with rustc (some seconds)');
    mkdirSync(folder, { recursive: true });
    const built = spawnSync(rustc, [...FLAGS, '-o', staging, 'src/main.rs'], {
      cwd: join(root, FOLDER),
      stdio: ['ignore', 'pipe', 'pipe'],
      encoding: 'utf8',
      env: { ...env, DSEC_AGENT_BUILD: build },
      timeout: TIMEOUT_MS,
    });
    if (built.status !== 0) {
      say(`dsec-agent could not be built; crun or runc is used instead.\n${(built.stderr ?? '').trim().slice(-2000)}`);
      return false;
    }
    chmodSync(staging, 0o755);
    renameSync(staging, join(root, PROGRAM));
    stamp();
    return true;
  } catch (error) {
    say(
      `dsec-agent could not be built; crun or runc is used instead: ${error instanceof Error ? error.message : error}`,
    );
    return false;
  } finally {
    rmSync(staging, { force: true });
  }
}
