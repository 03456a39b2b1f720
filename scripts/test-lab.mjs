/**
 * `npm run test:lab [-- --emulate] [--kernel SERIES] [vitest arguments]`: runs the tests named *.lab.ts in the lab, in one boot. Where there can be
 * no lab it says why, and ends with 0 unless DSEC_LAB=required. Its last line is `N passed, N failed`.
 */
import { argv, env, exit } from 'node:process';
import { pathToFileURL } from 'node:url';
import { LabUnavailable, quoted, runInLab } from '../bench/lab/lab.mjs';
import { bundledName, bundleTests } from './lab-bundle.mjs';
import { root, setup } from './setup.mjs';

/** Emulated, limits.lab alone takes ten minutes on a quiet machine, and all of it far longer on a busy one. */
const TIMEOUT_MS = 3 * 60 * 60_000;
/** With CI, where other tests have to run as well. */
const CI_TIMEOUT_MS = 25 * 60_000;
/** What runs with CI where no file is named: one way through each driver, and walls that only this kernel has. All of them take too long emulated. */
const CI_FILES = [
  'ublk-daemon.ublk.lab',
  'ublk-daemon.ublk-recovery.lab',
  'ublk-daemon.nbd-kernel.lab',
  'control.disk-attach.lab',
  'runtime.isolation.lab',
];

/**
 * @typedef {object} LabTotals
 * @property {string} [reason] Why it did not run.
 * @property {number} passed
 * @property {number} failed
 * @property {number} skipped
 */

/**
 * @param {readonly string[]} words for vitest
 * @param {{ emulate?: boolean, series?: string, signal?: AbortSignal, timeoutMs?: number }} [options]
 * @returns {Promise<LabTotals>}
 */
export async function testInLab(
  words,
  { emulate, series, signal, timeoutMs = env.CI ? CI_TIMEOUT_MS : TIMEOUT_MS } = {},
) {
  const bundle = await bundleTests(root);
  const vitest = ['node_modules/vitest/vitest.mjs', 'run', '--config', 'bench/lab/vitest.config.mjs'];
  // With CI, some tests do less.
  const settings = [`DSEC_LAB_BUNDLE=${quoted(bundle)}`, ...(env.CI ? ['CI=1 NO_COLOR=1'] : [])].join(' ');
  const command = [
    'node',
    ...vitest,
    '--configLoader',
    'native',
    ...(env.CI && words.length === 0 ? CI_FILES : words.map(bundledName)),
  ];
  let text = '';
  try {
    const status = await runInLab(`${settings} ${command.map(quoted).join(' ')}`, {
      cwd: root,
      emulate,
      series,
      timeoutMs,
      signal,
      onOutput(chunk) {
        process.stdout.write(chunk);
        text = (text + chunk.toString('latin1')).slice(-4096);
      },
    });
    const [, passed, failed, skipped] = /^lab: (\d+) passed, (\d+) failed, (\d+) skipped/m.exec(text) ?? [];
    const totals = { passed: Number(passed ?? 0), failed: Number(failed ?? 0), skipped: Number(skipped ?? 0) };
    if (status !== 0) totals.failed = Math.max(1, totals.failed);
    return totals;
  } catch (error) {
    if (!(error instanceof LabUnavailable)) throw error;
    return { reason: error.message, passed: 0, failed: env.DSEC_LAB === 'required' ? 1 : 0, skipped: 0 };
  }
}

if (import.meta.url === pathToFileURL(argv[1] ?? '').href) {
  const ending = new AbortController();
  for (const signal of /** @type {const} */ (['SIGINT', 'SIGTERM', 'SIGHUP']))
    process.once(signal, () => ending.abort());
  // Says itself what is missing.
  setup('lab');
  const emulate = argv.includes('--emulate');
  const words = argv.slice(2).filter((word) => word !== '--emulate');
  const at = words.indexOf('--kernel');
  const series = at === -1 ? undefined : (words.splice(at, 2)[1] ?? '');
  try {
    const { reason, passed, failed } = await testInLab(words, { emulate, series, signal: ending.signal });
    if (reason !== undefined) console.log(`skipped: ${reason}`);
    console.log(`${passed} passed, ${failed} failed`);
    exit(failed === 0 ? 0 : 1);
  } catch (error) {
    if (ending.signal.aborted) exit(130);
    throw error;
  }
}
