/** The commands of a sandbox, for another one with the same memory. */
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { CommandJournal, commandFolder } from '../aether/command-journal.ts';
import { copyCommands, copyRunning } from '../aether/copy-commands.ts';
import { OutputSpool } from '../aether/output-spool.ts';

let folder: string;
beforeEach(() => {
  folder = fs.mkdtempSync(join(tmpdir(), 'dsec-copied-'));
});
afterEach(() => fs.rmSync(folder, { recursive: true, force: true }));

const record = (id: number) => ({ id, args: ['true'], terminal: false, session: false, startedMs: id });
const result = {
  exitCode: 0,
  signal: undefined,
  timedOut: false,
  outOfMemory: false,
  stdoutBytes: 0,
  stderrBytes: 0,
  durationMs: 1,
};

it('those that run go along, with their output, and without who asked for them', async () => {
  const from = join(folder, 'from');
  const journal = new CommandJournal(from);
  journal.begin({ ...record(1), requestId: 'asked' });
  journal.begin(record(2));
  journal.begin(record(3));
  journal.end({ ...record(2), result });
  journal.end({ ...record(3), lost: 'nobody knows' });
  for (const id of [1, 2]) {
    const spool = new OutputSpool(join(commandFolder(from, id), 'stdout'));
    spool.write(0, Buffer.from(`of ${id}`));
    spool.close();
  }
  await copyRunning(from, join(folder, 'moment'));
  await copyCommands(join(folder, 'moment'), join(folder, 'fork'));
  // What comes later is the source's.
  journal.begin(record(4));
  journal.close();
  const copied = new CommandJournal(join(folder, 'fork'));
  expect(copied.records()).toEqual([{ ...record(1), background: true }]);
  expect(copied.lastId).toBe(3);
  const output = new OutputSpool(join(commandFolder(join(folder, 'fork'), 1), 'stdout'));
  expect(String(output.read(0, 100)?.bytes)).toBe('of 1');
  output.close();
  expect(fs.readdirSync(join(folder, 'fork')).sort()).toEqual(['1', 'journal']);
});

it('of a sandbox without any nothing goes along, and numbers begin at 1', async () => {
  await copyRunning(join(folder, 'none'), join(folder, 'moment'));
  await copyCommands(join(folder, 'moment'), join(folder, 'fork'));
  const copied = new CommandJournal(join(folder, 'fork'));
  expect([copied.records(), copied.lastId]).toEqual([[], 0]);
});
