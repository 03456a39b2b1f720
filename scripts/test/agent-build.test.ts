/** What of dsec-agent is promised of its file: one static program, under two megabytes. */
import { execFileSync } from 'node:child_process';
import { readFileSync, statSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { describe, expect, it } from 'vitest';
import { agentBuildState } from '../agent-build.mjs';

const root = dirname(dirname(dirname(fileURLToPath(import.meta.url))));
const path = join(root, 'dist/agent/dsec-agent');
const { fresh, build } = agentBuildState(root);
if (!fresh) console.log('skipped: dsec-agent is not built of these sources');

const MAX_BYTES = 2_000_000;
const PT_INTERP = 3;

describe.skipIf(!fresh)('dsec-agent', () => {
  it('is smaller than two megabytes', () => {
    expect(statSync(path).size).toBeLessThan(MAX_BYTES);
  });

  it('needs no library and no loader of anybody', () => {
    const elf = readFileSync(path);
    expect(elf.subarray(0, 5)).toEqual(Buffer.from('\x7fELF\x02', 'latin1'));
    const [at, size, count] = [Number(elf.readBigUInt64LE(32)), elf.readUInt16LE(54), elf.readUInt16LE(56)];
    const types = Array.from({ length: count }, (_, n) => elf.readUInt32LE(at + n * size));
    expect(count).toBeGreaterThan(0);
    expect(types).not.toContain(PT_INTERP);
  });

  it('says what it was built from', () => {
    expect(execFileSync(path, ['version']).toString()).toMatch(new RegExp(`^\\d+ ${build}\n$`));
  });
});
