/**
 * Builds linux/native/ into dist/ with one call of rustc, when it is not there yet. The file is named by the digest of its sources
 * and appears whole, by a rename. Without a rustc, or on another processor, there is none, and nothing needs it.
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { chmodSync, existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { arch, pid } from 'node:process';
import { findRustc } from './agent-build.mjs';

const SOURCES = 'linux/native';
const CRATE = `${SOURCES}/lib.rs`;
const PREFIX = 'dsec-native-';
/** rustc takes seconds; on a small machine a minute. */
const TIMEOUT_MS = 10 * 60_000;

/** linux/native.ts names it in the same way. @param {string} root */
function nativePath(root) {
  const hash = createHash('sha256');
  const folder = join(root, SOURCES);
  for (const name of readdirSync(folder).sort())
    if (name.endsWith('.rs')) hash.update(readFileSync(join(folder, name)));
  return join(root, 'dist', `${PREFIX}${hash.digest('hex').slice(0, 16)}.so`);
}

/**
 * Builds it if it is not there and can be. @param {string} root @param {(text: string) => void} say
 */
export function buildNative(root, say) {
  if (arch !== 'x64' || existsSync(nativePath(root))) return;
  const rustc = findRustc();
  if (rustc === undefined) return;
  say('Building the native library, which converts images faster, with rustc (some seconds)');
  const problem = compile(root, rustc);
  if (problem !== undefined) say(`It could not be built, so what Node has is used: ${problem}`);
}

/**
 * @param {string} root @param {string} rustc
 * @returns {string | undefined} Why it was not built; undefined when it is there.
 */
function compile(root, rustc) {
  const path = nativePath(root);
  const dist = join(root, 'dist');
  const staging = join(dist, `.${PREFIX}${pid}.so`);
  try {
    mkdirSync(dist, { recursive: true });
    const options = ['--edition', '2021', '-O', '-C', 'panic=abort', '-C', 'strip=symbols'];
    const args = [...options, '--crate-type', 'cdylib', '--crate-name', 'dsec_native', '-o', staging, CRATE];
    const { status, stderr, error } = spawnSync(rustc, args, { cwd: root, encoding: 'utf8', timeout: TIMEOUT_MS });
    if (status !== 0) return `rustc failed: ${error?.message ?? stderr.trim().slice(-500)}`;
    chmodSync(staging, 0o755);
    renameSync(staging, path);
    for (const name of readdirSync(dist)) {
      if (name.startsWith(PREFIX) && join(dist, name) !== path) rmSync(join(dist, name), { force: true });
    }
    return undefined;
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  } finally {
    rmSync(staging, { force: true });
  }
}
