/**
 * `npm run bench -- report`: docs/benchmarks.md and its figures, docs/figures/, from what was measured last (bench/results/). The
 * page says on which machines; benchmarks without a result here keep what the page says of them, unless they are no more or measure something else now.
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
  const path = 'docs/benchmarks.md';
  const isThere = (/** @type {string} */ name) => existsSync(join(root, 'bench', `${name}.bench.ts`));
  const found = readdirSync(results)
    .filter((file) => file.endsWith('.json') && isThere(file.replace('.json', '')))
    .map((file) => JSON.parse(readFileSync(join(results, file), 'utf8')));
  const before = pageEntries(existsSync(join(root, path)) ? readFileSync(join(root, path), 'utf8') : '');
  const names = new Set(found.map(({ bench }) => bench));
  /** @type {typeof before.entries} */
  const entries = new Map();
  for (const [name, entry] of before.entries) {
    if (names.has(name) || !isThere(name)) continue;
    const { about } = await load(name);
    if (entry.section.includes(`\n${capital(about)}. Against `)) entries.set(name, entry);
  }
  const machines = [...(entries.size > 0 ? before.machines : []), ...found.map(machineText)];
  mkdirSync(figures, { recursive: true });
  for (const result of found) {
    const { about } = await load(result.bench);
    const met = result.met === undefined ? '' : result.met ? 'yes' : 'no';
    const row = `| [${result.bench}](#${result.bench}) | ${result.ratio ?? ''} | ${cell(result.target)} | ${met} |`;
    const lines = [`## ${result.bench}`, '', `${capital(about)}. Against ${result.against}; ${result.n} runs.`, ''];
    const details = detailsOf(result);
    if (details.length > 0) lines.push('| | |', '| --- | --- |', ...details, '');
    for (const figure of [result.figures ?? result.figure ?? []].flat()) {
      const name = figure.replace(/^.*\//, '');
      const title = name.replace('.svg', '');
      if (!existsSync(join(results, name))) continue;
      copyFileSync(join(results, name), join(figures, name));
      if (CAPTIONS[title] !== undefined) lines.push(CAPTIONS[title], '');
      lines.push(`![${title}](figures/${name})`, '');
    }
    entries.set(result.bench, { row, section: lines.join('\n') });
  }
  const sorted = [...entries].sort(([a], [b]) => (a < b ? -1 : 1)).map(([, entry]) => entry);
  const page = [
    '# What was measured',
    '',
    'Written by `npm run bench -- report` from the last results. [bench/README.md](../bench/README.md) says how each is measured; only',
    `ratios of one run mean anything. On: ${[...new Set(machines)].join('; ')}.`,
    '',
    '| benchmark | ratio | target | met |',
    '| --- | --- | --- | --- |',
    ...sorted.map(({ row }) => row),
    '',
    ...sorted.map(({ section }) => section),
  ];
  writeFileSync(join(root, path), `${page.join('\n').trimEnd()}\n`);
  return path;
}

/**
 * What the page has: each benchmark's row and section, by its name.
 * @param {string} page
 */
export function pageEntries(page) {
  const rows = new Map([...page.matchAll(/^\| \[([\w-]+)\]\(#.*$/gm)].map(([row, name]) => [name, row]));
  /** @type {Map<string, { row: string, section: string }>} */
  const entries = new Map();
  for (const section of page.split(/^(?=## )/m).slice(1)) {
    const name = /^## (.*)$/m.exec(section)?.[1] ?? '';
    const row = rows.get(name);
    if (row !== undefined) entries.set(name, { row, section: `${section.trimEnd()}\n` });
  }
  return { entries, machines: /^ratios .* On: (.*)\.$/m.exec(page)?.[1]?.split('; ') ?? [] };
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

/** @param {{ machine: { cpu: string, cores: number, memoryMiB: number, kernel: string, node: string } }} result */
function machineText({ machine: { cpu, cores, memoryMiB, kernel, node } }) {
  return `${cpu}, ${cores} cores, ${Math.round(memoryMiB / 1024)} GiB, Linux ${kernel}, Node ${node}`;
}
