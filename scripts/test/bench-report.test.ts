import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { writeReport } from '../bench-report.mjs';

let root = '';
beforeEach(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-bench-report-'));
  mkdirSync(join(root, 'bench/results'), { recursive: true });
  mkdirSync(join(root, 'docs'));
  for (const name of ['one', 'two', 'three']) writeFileSync(join(root, `bench/${name}.bench.ts`), '');
});
afterEach(() => rmSync(root, { recursive: true, force: true }));

const machine = { cpu: 'CPU', cores: 2, memoryMiB: 2048, kernel: '6.1', node: '20' };
const put = (bench: string, ratio: number, cores = 2) => {
  const result = {
    bench,
    ratio,
    target: '>= 1',
    met: ratio >= 1,
    against: 'a peer',
    n: 3,
    machine: { ...machine, cores },
  };
  writeFileSync(join(root, `bench/results/${bench}.json`), JSON.stringify(result));
};
const report = async (verb = 'measures') => {
  const path = await writeReport(root, async (name: string) => ({ about: `what ${name} ${verb}` }));
  return readFileSync(join(root, path), 'utf8');
};

test('what was not measured again keeps what the page says; what is no more goes', async () => {
  put('two', 2);
  put('three', 0.5);
  const first = await report();
  expect(first).toContain('| [three](#three) | 0.5 | >= 1 | no |\n| [two](#two) | 2 | >= 1 | yes |\n');
  rmSync(join(root, 'bench/results/two.json'));
  rmSync(join(root, 'bench/results/three.json'));
  expect(await report()).toBe(first);
  rmSync(join(root, 'bench/three.bench.ts'));
  put('one', 3, 4);
  const second = await report();
  expect(second).toContain(
    '| --- | --- | --- | --- |\n| [one](#one) | 3 | >= 1 | yes |\n| [two](#two) | 2 | >= 1 | yes |\n\n## one\n',
  );
  expect(second).toContain('\n## two\n\nWhat two measures. Against a peer; 3 runs.\n');
  expect(second).toContain('On: CPU, 2 cores, 2 GiB, Linux 6.1, Node 20; CPU, 4 cores, 2 GiB, Linux 6.1, Node 20.\n');
  expect(second).not.toContain('three');
  // Another thing is measured under that name now.
  expect(await report('counts')).not.toContain('two');
});
