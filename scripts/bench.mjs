/**
 * `npm run bench -- list | NAME... | all | report`: runs benchmarks, bench/<NAME>.bench.ts. Each prints for people as it goes and ends
 * with one JSON line: bench, ratio, target, met, against, n, p50, p99, machine. The lines are kept in bench/results/ too;
 * `report` makes docs/benchmarks.md of them.
 * Options (--n=7, --full, ...: bench/options.ts) are the benchmarks'; `--clean` removes what they keep between runs.
 *
 * A benchmark exports `benchmark`: { name, about, needs?: () => string | undefined, run(): Promise<Result> }. They run from a
 * bundle of their own, so that what is measured is the code as it is shipped.
 */
import { mkdirSync, readdirSync, writeFileSync } from 'node:fs';
import { availableParallelism, cpus, release, totalmem } from 'node:os';
import { join } from 'node:path';
import { argv, exit } from 'node:process';
import { pathToFileURL } from 'node:url';
import { writeReport } from './bench-report.mjs';
import { freshBundle } from './bundle-stamp.mjs';
import { root, setup } from './setup.mjs';

/**
 * @typedef {object} Benchmark
 * @property {string} name
 * @property {string} about
 * @property {() => string | undefined | Promise<string | undefined>} [needs] Why it cannot run here; undefined when it can.
 * @property {() => Promise<Record<string, unknown>>} run
 */

const names = readdirSync(join(root, 'bench'))
  .filter((name) => name.endsWith('.bench.ts'))
  .map((name) => name.slice(0, -'.bench.ts'.length))
  .sort();
const chosen = argv.slice(2).filter((word) => !word.startsWith('--'));
const clean = argv.includes('--clean');
const results = join(root, 'bench/results');

if (chosen.length === 0 && !clean) {
  console.error('npm run bench -- list | NAME... | all | report [--n=N] [--mb=N] [--full] [--keep], or --clean');
  exit(2);
}
const unknown = chosen.filter((name) => !['list', 'all', 'report'].includes(name) && !names.includes(name));
if (unknown.length > 0) {
  console.error(`no benchmark ${unknown.join(', ')}; npm run bench -- list shows what there is`);
  exit(2);
}

if (names.length === 0) {
  console.log('there is no benchmark yet');
  exit(0);
}
setup('start');
const { buildBundle, presentWorkers } = await import('./bundle.mjs');
const entries = Object.fromEntries(names.map((name) => [`${name}.bench`, join(root, 'bench', `${name}.bench.ts`)]));
entries['work-folder'] = join(root, 'bench/work-folder.ts');
entries['simulated-edges'] = join(root, 'bench/simulated-edges.ts');
// The entries are part of the name: a benchmark that is added makes another bundle.
const folder =
  freshBundle(root, bundleName()) ?? (await buildBundle(root, bundleName(), { ...entries, ...presentWorkers(root) }));

if (clean) {
  const { removeBenchFolder } = await import(pathToFileURL(join(folder, 'work-folder.mjs')).href);
  removeBenchFolder();
  exit(0);
}
if (chosen.includes('list')) {
  for (const name of names) {
    const { about } = await load(name);
    console.log(`${name.padEnd(24)} ${about}`);
  }
  exit(0);
}
if (chosen.includes('report')) {
  console.log(await writeReport(root, load));
  exit(0);
}
let failed = false;
for (const name of chosen.includes('all') ? names : chosen) {
  const benchmark = await load(name);
  const obstacle = await benchmark.needs?.();
  if (obstacle !== undefined) {
    console.log(`${name}: skipped: ${obstacle}`);
    continue;
  }
  console.log(`== ${name}: ${benchmark.about}`);
  try {
    const result = await benchmark.run();
    const line = JSON.stringify({ bench: name, ...result, machine: machine() });
    mkdirSync(results, { recursive: true });
    writeFileSync(join(results, `${name}.json`), `${line}\n`);
    console.log(line);
  } catch (error) {
    failed = true;
    console.error(error);
  }
}
exit(failed ? 1 : 0);

function bundleName() {
  return `bench-${names.length}`;
}

/** @param {string} name @returns {Promise<Benchmark>} */
async function load(name) {
  const module = await import(pathToFileURL(join(folder, `${name}.bench.mjs`)).href);
  return module.benchmark;
}

function machine() {
  return {
    cpu: cpus()[0]?.model ?? 'unknown',
    cores: availableParallelism(),
    memoryMiB: Math.round(totalmem() / 2 ** 20),
    kernel: release(),
    node: process.versions.node,
  };
}
