/** The journal of a sandbox's commands: what was written is found again, whatever was torn, however often it was written anew. */
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { CommandJournal, type CommandRecord, commandFolder, shownArgs } from '../aether/command-journal.ts';
import { accountsState } from '../sandbox/accounts-state.ts';

const RESULT = { exitCode: 3, timedOut: false, outOfMemory: false, stdoutBytes: 0, stderrBytes: 0, durationMs: 5 };

describe('the journal of commands', () => {
  let folder: string;
  beforeEach(() => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-journal-'));
  });
  afterEach(() => fs.rmSync(folder, { recursive: true, force: true }));

  const commands = () => join(folder, 'commands');
  const path = () => join(commands(), 'journal');
  const record = (id: number, more: Partial<CommandRecord> = {}): CommandRecord => ({
    id,
    args: ['true'],
    terminal: false,
    session: false,
    startedMs: 1_700_000_000_000 + id,
    ...more,
  });
  const again = () => new CommandJournal(commands());

  it('is what the next process finds', () => {
    const journal = again();
    expect([journal.records(), journal.lastId, fs.existsSync(commands())]).toEqual([[], 0, false]);
    journal.begin(record(1, { requestId: 'a' }));
    journal.begin(record(2));
    journal.end({ ...record(1), result: RESULT });
    expect(again().records()).toEqual([record(1, { requestId: 'a', result: RESULT }), record(2)]);
    journal.end({ ...record(2), lost: 'nobody knows' });
    journal.begin(record(3));
    journal.forget(3);
    const third = again();
    expect(third.records()[1]).toEqual(record(2, { lost: 'nobody knows' }));
    expect([third.records().length, third.lastId]).toEqual([2, 3]);
    expect(fs.statSync(path()).mode & 0o777).toBe(0o600);
    journal.close();
  });

  it('leaves out what was torn, and goes on behind it', () => {
    const journal = again();
    journal.begin(record(1));
    journal.begin(record(2));
    journal.close();
    const whole = fs.readFileSync(path());
    for (let cut = 0; cut < whole.length; cut++) {
      fs.writeFileSync(path(), whole.subarray(0, cut));
      const torn = again();
      const left = torn.records().map(({ id }) => id);
      expect([[], [1], [1, 2]]).toContainEqual(left);
      torn.begin(record(7));
      torn.close();
      expect(
        again()
          .records()
          .map(({ id }) => id),
      ).toEqual([...left, 7]);
    }
    // What a file system leaves of a line after the power went, and what no version wrote.
    fs.writeFileSync(path(), `${'\0'.repeat(100)}\n[]\nnull\n7\n{"other":1}\n${whole.toString()}`);
    expect(again().records()).toEqual([record(1), record(2)]);
  });

  it('stays small, and never forgets a number', () => {
    const journal = again();
    const args = ['x'.repeat(1000)];
    for (let id = 1; id <= 2000; id++) {
      journal.begin(record(id, { args }));
      journal.end({ ...record(id), result: RESULT });
      if (id > 10) journal.forget(id - 10);
    }
    expect(fs.statSync(path()).size).toBeLessThan(512 << 10);
    for (let id = 1991; id <= 2000; id++) journal.forget(id);
    for (let i = 0; i < 5000; i++) journal.begin(record(2001, { args }));
    journal.forget(2001);
    journal.close();
    const next = again();
    expect([next.records(), next.lastId]).toEqual([[], 2001]);
  });

  it('is written anew only when that spares something, whatever it says', () => {
    const journal = again();
    const args = shownArgs(['漢'.repeat(20_000), 'x'.repeat(1_000_000), Buffer.from('more')]);
    expect(args).toEqual([`${'漢'.repeat(16 << 10)}…`, '…']);
    for (let id = 1; id <= 256; id++) journal.begin(record(id, { args }));
    let anew = 0;
    for (let id = 257; id <= 300; id++) {
      const { ino } = fs.statSync(path());
      journal.begin(record(id, { args }));
      journal.forget(id - 256);
      if (fs.statSync(path()).ino !== ino) anew++;
    }
    expect(anew).toBeLessThanOrEqual(1);
    journal.close();
    expect(again().records().length).toBe(256);
  });

  it('removes output with what it was of, and gives out no number that output has', () => {
    fs.mkdirSync(commandFolder(commands(), 41), { recursive: true });
    const journal = again();
    expect(journal.lastId).toBe(41);
    journal.begin(record(42));
    fs.mkdirSync(commandFolder(commands(), 42));
    journal.forget(42);
    expect(fs.readdirSync(commands()).sort()).toEqual(['41', 'journal']);
    journal.close();
  });

  it('holds few files open, however many sandboxes there are', () => {
    const open = () => fs.readdirSync('/proc/self/fd').length;
    for (let at = 0; at < 200; at++) fs.mkdirSync(join(folder, String(at)));
    const before = open();
    const all = Array.from({ length: 200 }, (_, at) => new CommandJournal(join(folder, String(at), 'commands')));
    for (const journal of all) journal.begin(record(1));
    expect(open() - before).toBeLessThan(140);
    for (const journal of all) journal.end({ ...record(1), result: RESULT });
    for (const journal of all) journal.close();
    expect(open()).toBe(before);
    expect(new CommandJournal(join(folder, '0', 'commands')).records()).toEqual([record(1, { result: RESULT })]);
  });

  it('a sandbox that has changed its accounts, or hides them, has them read again', () => {
    const root = join(folder, 'root');
    fs.mkdirSync(root);
    expect(accountsState(root)).toBe('absent');
    fs.mkdirSync(join(root, 'etc'));
    const empty = accountsState(root);
    expect(empty).toBe('folder absent absent');
    fs.writeFileSync(join(root, 'etc/passwd'), 'root:x:0:0::/:\n');
    // Just written: the next change might leave the same times.
    expect(accountsState(root)).toBeUndefined();
    fs.rmSync(join(root, 'etc/passwd'));
    fs.symlinkSync('/etc/passwd', join(root, 'etc/passwd'));
    expect(accountsState(root)).toBeUndefined();
    fs.rmSync(join(root, 'etc'), { recursive: true });
    fs.symlinkSync('/etc', join(root, 'etc'));
    expect(accountsState(root)).toBeUndefined();
    // One that nobody touches.
    expect(accountsState('/')).toMatch(/^folder \d+:\d+:\d+:\d+:\d+ /);
    expect(accountsState('/')).toBe(accountsState('/'));
  });
});
