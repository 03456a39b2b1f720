/**
 * `npm run bench -- report`: docs/benchmarks.md and its figures, docs/figures/, from what was measured last (bench/results/). The
 * page says on which machine; benchmarks without a result are not on it.
 */
import { copyFileSync, existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

/** What a figure's file name does not say. @type {Readonly<Record<string, string>>} */
const CAPTIONS = {
  'burst-completion':
    'A burst of sandboxes over images that the node has never seen, behind a link of limited bandwidth and latency: how many have ended, over time.',
  'burst-disk': 'What the node wrote to its disk for that burst.',
  'burst-iops': 'And in how many requests a second.',
  'bytes-fetched': 'Fetched in chunks of 256 KiB and read ahead, for each byte in a page of 4 KiB that was read.',
};
/** Told in the table already. */
const PLAIN = new Set([
  'bench',
  'ratio',
  'target',
  'met',
  'against',
  'n',
  'p50',
  'p99',
  'unit',
  'machine',
  'figure',
  'figures',
]);

/**
 * @param {string} root Of the project.
 * @param {(name: string) => Promise<{ about: string }>} load
 * @returns {Promise<string>} The page's path.
 */
export async function writeReport(root, load) {
  const results = join(root, 'bench/results');
  const figures = join(root, 'docs/figures');
  const found = readdirSync(results)
    .filter((file) => file.endsWith('.json') && existsSync(join(root, 'bench', file.replace('.json', '.bench.ts'))))
    .sort()
    .map((file) => JSON.parse(readFileSync(join(results, file), 'utf8')));
  mkdirSync(figures, { recursive: true });
  const rows = [];
  const sections = [];
  for (const result of found) {
    const { about } = await load(result.bench);
    const met = result.met === undefined ? '' : result.met ? 'yes' : 'no';
    const ratio = result.ratio ?? '';
    rows.push(`| [${result.bench}](#${result.bench}) | ${ratio} | ${cell(result.target)} | ${met} |`);
    sections.push(`## ${result.bench}`, '', `${capital(about)}. Against ${result.against}; ${result.n} runs.`, '');
    const details = detailsOf(result);
    if (details.length > 0) sections.push('| | |', '| --- | --- |', ...details, '');
    for (const figure of [result.figures ?? result.figure ?? []].flat()) {
      const name = figure.replace(/^.*\//, '');
      const title = name.replace('.svg', '');
      if (!existsSync(join(results, name))) continue;
      copyFileSync(join(results, name), join(figures, name));
      if (CAPTIONS[title] !== undefined) sections.push(CAPTIONS[title], '');
      sections.push(`![${title}](figures/${name})`, '');
    }
  }
  const page = [
    '# What was measured',
    '',
    'Written by `npm run bench -- report` from the last results. [bench/README.md](../bench/README.md) says how each is measured; only',
    `ratios of one run mean anything. On: ${machines(found)}.`,
    '',
    '| benchmark | ratio | target | met |',
    '| --- | --- | --- | --- |',
    ...rows,
    '',
    ...sections,
  ];
  const path = 'docs/benchmarks.md';
  writeFileSync(join(root, path), `${page.join('\n').trimEnd()}\n`);
  return path;
}

/** Numbers and texts of the result; what has a structure of its own is left to the JSON. @param {Record<string, unknown>} result */
function detailsOf(result) {
  const rows = [];
  for (const [name, value] of Object.entries(result)) {
    if (PLAIN.has(name)) continue;
    if (['number', 'string', 'boolean'].includes(typeof value)) rows.push(`| ${name} | ${cell(value)} |`);
    else if (isFlat(value)) {
      const parts = Object.entries(/** @type {object} */ (value)).map(([key, part]) => `${key}: ${part}`);
      rows.push(`| ${name} | ${cell(parts.join(', '))} |`);
    }
  }
  return rows;
}

/** @param {unknown} value An object of a few numbers. */
function isFlat(value) {
  return (
    typeof value === 'object' &&
    value !== null &&
    !Array.isArray(value) &&
    Object.values(value).length <= 8 &&
    Object.values(value).every((part) => typeof part === 'number')
  );
}

/** @param {unknown} value */
function cell(value) {
  return String(value ?? '').replaceAll('|', '\\|');
}

/** @param {string} text */
function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** @param {readonly { machine: { cpu: string, cores: number, memoryMiB: number, kernel: string, node: string } }[]} results */
function machines(results) {
  const all = results.map(
    ({ machine: { cpu, cores, memoryMiB, kernel, node } }) =>
      `${cpu}, ${cores} cores, ${Math.round(memoryMiB / 1024)} GiB, Linux ${kernel}, Node ${node}`,
  );
  return [...new Set(all)].join('; ');
}
