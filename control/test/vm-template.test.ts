/** `dsec vm template` where there is none, and with one that is of no use any more; none is made here. */
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, describe, expect, it } from 'vitest';
import { runCommand } from './command-run.ts';

describe.skipIf(process.getuid?.() !== 0)('dsec vm template', () => {
  const folder = fs.mkdtempSync(join(tmpdir(), 'dsec-vm-template-'));
  const before = process.env.DSEC_STATE;
  process.env.DSEC_STATE = folder;
  afterAll(() => {
    if (before === undefined) delete process.env.DSEC_STATE;
    else process.env.DSEC_STATE = before;
    fs.rmSync(folder, { recursive: true, force: true });
  });
  const templates = join(folder, 'vm/templates');
  afterEach(() => fs.rmSync(templates, { recursive: true, force: true }));

  function plant(key: string): void {
    fs.mkdirSync(join(templates, key, 's-0'), { recursive: true });
    const record = { version: 1, key, world: 'of yesterday', cpus: 2, memoryBytes: 512 << 20, reporting: true };
    const rest = {
      made: '2026-01-02T03:04:05.000Z',
      kernel: '6.12.1',
      bytes: 80_000_000,
      snapshot: 's-0',
      digests: {},
    };
    fs.writeFileSync(join(templates, key, 'template.json'), JSON.stringify({ ...record, ...rest }));
  }
  const a = 'a'.repeat(24);
  const b = 'b'.repeat(24);

  it('lists none, and those that there are', async () => {
    expect(JSON.parse((await runCommand('vm', 'template', 'ls', '--json')).text)).toEqual([]);
    plant(a);
    const listed = JSON.parse((await runCommand('vm', 'template', 'ls', '--json')).text);
    expect(listed).toEqual([
      expect.objectContaining({ template: a, cpus: 2, memoryBytes: 512 << 20, reporting: true, kernel: '6.12.1' }),
    ]);
    // Where there is no QEMU or kernel nothing is known of it.
    expect([false, null]).toContain(listed[0].useful);
    expect((await runCommand('vm', 'template', 'ls')).text).toMatch(new RegExp(`^TEMPLATE .*\n${a} +2 +512 MiB `));
  });

  it('takes away those that are named, or all', async () => {
    plant(a);
    plant(b);
    await expect(runCommand('vm', 'template', 'rm')).rejects.toMatchObject({ code: 'CLI_USAGE' });
    await expect(runCommand('vm', 'template', 'rm', a, '../../x')).rejects.toMatchObject({ code: 'CLI_USAGE' });
    expect(fs.readdirSync(templates).sort()).toEqual([a, b]);
    expect((await runCommand('vm', 'template', 'rm', a)).text).toBe(`${a}\n`);
    expect(fs.readdirSync(templates)).toEqual([b]);
    expect((await runCommand('vm', 'template', 'rm', '--all')).text).toBe(`${b}\n`);
    expect(fs.readdirSync(templates)).toEqual([]);
  });

  it('refuses sizes that are none before it boots anything', async () => {
    for (const args of [
      ['--cpus', '0'],
      ['--cpus', 'many'],
      ['--memory', 'much'],
    ])
      await expect(runCommand('vm', 'template', 'make', ...args)).rejects.toThrow();
    expect(fs.existsSync(templates) ? fs.readdirSync(templates) : []).toEqual([]);
  });
});
