/**
 * `npm test [-- vitest arguments]`: sets up, checks types, lint and layering, runs every test, then the image cases, then looks
 * for what the run left behind. The last line is `N passed, N failed`. With arguments (a part of the tests) the image cases
 * are left out. With CI=1 the tests of the kernel lab run too, where there can be one (`npm run test:lab`).
 *
 * The run has a temporary folder, store and node state of its own, so that it neither meets nor disturbs an installation.
 */
import { spawn } from 'node:child_process';
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readFileSync, realpathSync, rmSync, statfsSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { argv, env, execPath, exit, getuid } from 'node:process';
import { check } from './check.mjs';
import { leftoversOf, removeLeftovers } from './leftovers.mjs';
import { root, setup } from './setup.mjs';

/** File systems whose files the kernel mounts as EROFS: ext4, xfs, btrfs. */
const MOUNTABLE = new Set([0xef53, 0x58465342, 0x9123683e]);

/** Processes that have just been told to end get this long. */
const SETTLE_MS = 3000;

const vitestArguments = argv.slice(2);
const inCi = env.CI !== undefined && env.CI !== '' && vitestArguments.length === 0;
const totals = { passed: 0, failed: 0, skipped: 0 };

setup(inCi ? 'lab' : 'test');

const { folder, mountable } = workFolder();
const temporary = join(folder, 'tmp');
mkdirSync(temporary);
const mark = `DSEC_TEST_RUN=${folder}`;
const runEnv = {
  ...env,
  DSEC_TEST_RUN: folder,
  TMPDIR: temporary,
  DSEC_STORE: `file://${folder}/store`,
  DSEC_RUN: join(folder, 'run'),
  DSEC_CACHE: join(folder, 'cache'),
  DSEC_STATE: join(folder, 'state'),
};
/** @type {import('node:child_process').ChildProcess | undefined} */
let child;

for (const signal of /** @type {const} */ (['SIGINT', 'SIGTERM', 'SIGHUP'])) {
  process.once(signal, async () => {
    child?.kill(signal);
    await new Promise((done) => setTimeout(done, 1000));
    cleanUp();
    exit(signal === 'SIGINT' ? 130 : 143);
  });
}

try {
  title('check');
  const failedChecks = check();
  totals.failed += failedChecks.length;
  totals.passed += 4 - failedChecks.length;

  title('bundle');
  count((await run(execPath, [join(root, 'bin/dsec'), 'version'])).status === 0);

  title('tests');
  await unitTests();

  if (vitestArguments.length === 0) {
    title('image cases');
    await imageCases();
  }

  if (inCi) {
    title('kernel lab');
    await labTests();
  }

  title('leftovers');
  const leftovers = await settle();
  for (const line of leftovers) console.log(`left behind: ${line}`);
  count(leftovers.length === 0);
} finally {
  cleanUp();
}

if (totals.skipped > 0) console.log(`${totals.skipped} skipped`);
console.log(`${totals.passed} passed, ${totals.failed} failed`);
exit(totals.failed === 0 && totals.passed > 0 ? 0 : 1);

/** @param {string} text */
function title(text) {
  console.log(`\n== ${text}`);
}

/** @param {boolean} ok */
function count(ok) {
  if (ok) totals.passed++;
  else totals.failed++;
}

/**
 * On a file system that EROFS images can be mounted from, where there is one.
 * @returns {{ folder: string, mountable: boolean }}
 */
function workFolder() {
  const candidates = [tmpdir(), '/var/tmp', join(root, '.cache')];
  for (const candidate of candidates) {
    try {
      if (candidate.startsWith(root)) mkdirSync(candidate, { recursive: true });
      if (MOUNTABLE.has(statfsSync(candidate).type)) {
        return { folder: openFolder(candidate), mountable: true };
      }
    } catch {
      // Not there or not writable: the next one.
    }
  }
  return { folder: openFolder(tmpdir()), mountable: false };
}

/**
 * @param {string} command @param {string[]} args
 * @param {(line: string) => void} [onLine] Sees each line of stdout, which is printed all the same.
 * @returns {Promise<{ status: number }>}
 */
function run(command, args, onLine) {
  return new Promise((done) => {
    const started = spawn(command, args, {
      cwd: root,
      env: runEnv,
      stdio: ['ignore', onLine === undefined ? 'inherit' : 'pipe', 'inherit'],
    });
    child = started;
    let rest = '';
    started.stdout?.setEncoding('utf8').on('data', (/** @type {string} */ text) => {
      process.stdout.write(text);
      const lines = (rest + text).split('\n');
      rest = lines.pop() ?? '';
      for (const line of lines) onLine?.(line);
    });
    started.on('error', (error) => {
      console.error(`${command}: ${error.message}`);
      done({ status: 127 });
    });
    started.on('close', (code) => {
      if (rest !== '') onLine?.(rest);
      done({ status: code ?? 1 });
    });
  });
}

async function unitTests() {
  const results = join(folder, 'vitest.json');
  const { status } = await run(execPath, [
    join(root, 'node_modules/vitest/vitest.mjs'),
    'run',
    '--reporter=default',
    '--reporter=json',
    `--outputFile.json=${results}`,
    ...vitestArguments,
  ]);
  /** @type {{ testResults: { status: string, name: string, assertionResults: { status: string }[] }[] }} */
  let report;
  try {
    report = JSON.parse(readFileSync(results, 'utf8'));
  } catch {
    console.log('the tests ended without a report');
    totals.failed++;
    return;
  }
  let failed = 0;
  for (const file of report.testResults) {
    let failedHere = 0;
    for (const { status: outcome } of file.assertionResults) {
      if (outcome === 'passed') totals.passed++;
      else if (outcome === 'failed') failedHere++;
      else totals.skipped++;
    }
    // A file that could not be loaded has no test to blame.
    failed += file.status === 'failed' ? Math.max(1, failedHere) : failedHere;
  }
  // Errors outside any test fail the run without failing a test.
  totals.failed += status !== 0 ? Math.max(1, failed) : failed;
}

async function imageCases() {
  const runner = resolve(root, '../shared/image-cases/run.py');
  const reason = !existsSync(runner)
    ? 'there is no ../shared/image-cases here'
    : getuid?.() !== 0
      ? 'they mount images, which needs root'
      : !mountable
        ? 'no temporary folder on ext4, xfs or btrfs, which the kernel needs to mount from'
        : undefined;
  if (reason !== undefined) {
    console.log(`skipped: ${reason}`);
    return;
  }
  /** @type {[number, number] | undefined} */
  let sums;
  const { status } = await run(
    'python3',
    ['-B', runner, '-j', '2', '--dsec', `"${join(root, 'bin/dsec')}"`, '--tmp', temporary],
    (line) => {
      const match = /^(\d+) passed, (\d+) failed$/.exec(line);
      if (match !== null) sums = [Number(match[1]), Number(match[2])];
    },
  );
  totals.passed += sums?.[0] ?? 0;
  totals.failed += status !== 0 ? Math.max(1, sums?.[1] ?? 0) : 0;
}

/** Says itself why it does not run. */
async function labTests() {
  /** @type {[number, number, number] | undefined} */
  let sums;
  const { status } = await run(execPath, [join(root, 'scripts/test-lab.mjs')], (line) => {
    const match = /^lab: (\d+) passed, (\d+) failed, (\d+) skipped$/.exec(line);
    if (match !== null) sums = [Number(match[1]), Number(match[2]), Number(match[3])];
  });
  totals.passed += sums?.[0] ?? 0;
  totals.failed += status !== 0 ? Math.max(1, sums?.[1] ?? 0) : 0;
  totals.skipped += sums?.[2] ?? 0;
}

/** What is left once everything that is ending has ended. */
async function settle() {
  const until = Date.now() + SETTLE_MS;
  for (;;) {
    const leftovers = leftoversOf({ folder, temporary, mark });
    if (leftovers.length === 0 || Date.now() > until) return leftovers;
    await new Promise((done) => setTimeout(done, 100));
  }
}

function cleanUp() {
  if (removeLeftovers({ folder, mark })) rmSync(folder, { recursive: true, force: true });
  else console.error(`${folder} is kept: something is still mounted in it`);
}

/**
 * A new folder that other users may pass through: some tests become one.
 * @param {string} parent
 */
function openFolder(parent) {
  const folder = realpathSync(mkdtempSync(join(parent, 'dsec-test-')));
  chmodSync(folder, 0o755);
  return folder;
}
