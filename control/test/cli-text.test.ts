import { EventEmitter } from 'node:events';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough, Writable } from 'node:stream';
import { describe, expect, it } from 'vitest';
import { errorTable } from '#base';
import { storeOfSudoUser } from '../cli/other-store.ts';
import { formatTable, Output } from '../cli/output.ts';
import { progressOn, progressText } from '../cli/progress-line.ts';
import { reportOf, reportText } from '../cli/report-error.ts';
import { parseSize } from '../cli/size.ts';

describe('reportOf', () => {
  const fail = errorTable({ GONE: { message: 'no image "{name}"', hint: 'convert {name} first', exit: 4, http: 404 } });
  const plain = { json: false, debug: false };

  it('prints a known error with its hint and takes its exit status', () => {
    const report = reportOf(fail('GONE', { name: 'web:1' }));
    expect(report.exit).toBe(4);
    expect(reportText(report, plain)).toBe('dsec: no image "web:1"\n      convert web:1 first\n');
    expect(JSON.parse(reportText(report, { json: true, debug: false }))).toEqual({
      error: { code: 'GONE', message: 'no image "web:1"', hint: 'convert web:1 first' },
    });
  });

  it('does not call a full disk a bug', () => {
    const error = Object.assign(new Error('ENOSPC: no space left on device, write'), {
      code: 'ENOSPC',
      syscall: 'write',
    });
    expect(reportText(reportOf(error), plain)).toMatch(
      /^dsec: ENOSPC: no space left on device, write\n {6}free some space/,
    );
    expect(reportOf(Object.assign(new Error('EACCES: ...'), { code: 'EACCES', syscall: 'open' })).exit).toBe(5);
  });

  it('calls anything else a bug, on one line, with the stack only when asked for', () => {
    const error = new TypeError('x is not a function\nsecond line');
    const report = reportOf(error);
    expect([report.exit, report.code]).toEqual([1, 'BUG']);
    expect(reportText(report, plain)).toBe(
      'dsec: unexpected: x is not a function\n      this is a bug in dsec: run it again with DSEC_DEBUG=1 and report what it prints\n',
    );
    expect(reportText(report, { json: false, debug: true })).toContain('cli-text.test.ts');
    expect(reportOf('thrown text').message).toBe('unexpected: thrown text');
    expect(reportOf(Object.assign(new TypeError('bad argument'), { code: 'ERR_INVALID_ARG_TYPE' })).code).toBe('BUG');
  });
});

describe('the store of whoever called sudo', () => {
  it('is named when it exists, and only to root who chose none', () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-sudo-'));
    try {
      const passwd = join(folder, 'passwd');
      writeFileSync(passwd, `root:x:0:0::/root:/bin/sh\nmia:x:1000:1000::${folder}/mia:/bin/sh\n`);
      expect(storeOfSudoUser({ SUDO_USER: 'mia' }, 0, passwd)).toBeUndefined();
      const store = join(folder, 'mia/.local/share/dsec/store');
      mkdirSync(store, { recursive: true });
      expect(storeOfSudoUser({ SUDO_USER: 'mia' }, 0, passwd)).toBe(store);
      expect(storeOfSudoUser({ SUDO_USER: 'mia', DSEC_STORE: '/x' }, 0, passwd)).toBeUndefined();
      expect(storeOfSudoUser({ SUDO_USER: 'mia' }, 1000, passwd)).toBeUndefined();
      expect(storeOfSudoUser({ SUDO_USER: 'nobody-here' }, 0, passwd)).toBeUndefined();
      expect(storeOfSudoUser({}, 0, passwd)).toBeUndefined();
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });
});

describe('parseSize', () => {
  it.each([
    ['0', 0],
    ['163840', 163840],
    ['3GiB', 3 * 2 ** 30],
    ['3 gib', 3 * 2 ** 30],
    ['1.5MiB', 1.5 * 2 ** 20],
    ['64K', 65536],
    ['500MB', 500e6],
    ['2t', 2 ** 41],
  ])('%s', (text, expected) => expect(parseSize('--limit', text)).toBe(expected));

  it.each(['', 'GiB', '-1', '1e9', '3XiB', '0x10', '9999999999TiB', '1.2.3'])('refuses "%s"', (text) => {
    expect(() => parseSize('--limit', text)).toThrow(expect.objectContaining({ code: 'CLI_SIZE', exit: 2 }));
  });
});

describe('formatTable', () => {
  it('aligns columns and leaves no blanks at line ends', () => {
    const table = formatTable(
      [{ title: 'NAME' }, { title: 'SIZE', right: true }, { title: 'NOTE' }],
      [
        ['a', '1', ''],
        ['longer', '1000', 'x'],
      ],
    );
    expect(table).toBe('NAME    SIZE  NOTE\na          1\nlonger  1000  x\n');
  });
});

describe('progress', () => {
  it('is one line a task, never wider than the terminal', () => {
    const lines = progressText(
      [
        { task: 'layer 1/2', phase: 'fetch', doneBytes: 512, totalBytes: 1024 },
        { task: 'layer 2/2', phase: 'write', doneBytes: 2048, note: 'a note that is too long for this terminal' },
      ],
      40,
    );
    expect(lines).toEqual(
      ['layer 1/2  fetch   50%  512 B of 1.00 Ki', 'layer 2/2  write  2.00 KiB  a note that'].map((line) =>
        line.slice(0, 39),
      ),
    );
  });

  it('sums up what does not fit', () => {
    const events = Array.from({ length: 20 }, (_, i) => ({ task: `layer ${i}`, phase: 'fetch' }));
    const lines = progressText(events, 80);
    expect(lines).toHaveLength(8);
    expect(lines.at(-1)).toBe('and 13 more');
  });

  it('draws nothing into a pipe', () => {
    const stream = new PassThrough() as unknown as NodeJS.WriteStream;
    const { progress, end } = progressOn(stream);
    progress({ task: 'a', phase: 'b' });
    end();
    expect((stream as unknown as PassThrough).read()).toBeNull();
  });

  it('takes away on a terminal what it has drawn', async () => {
    let text = '';
    const stream = Object.assign(new EventEmitter(), {
      isTTY: true,
      columns: 80,
      write: (chunk: string) => {
        text += chunk;
      },
    }) as unknown as NodeJS.WriteStream;
    const { progress, end } = progressOn(stream);
    progress({ task: 'layer 1/1', phase: 'fetch' });
    while (text === '') await new Promise((resolve) => setTimeout(resolve, 10));
    end();
    expect(text).toBe('layer 1/1  fetch\n\u001b[1A\u001b[J');
  });
});

describe('Output', () => {
  it('waits for a slow reader, and stops waiting when it leaves', async () => {
    const written: string[] = [];
    let release = () => {};
    const slow = new Writable({
      highWaterMark: 1,
      write(chunk, _encoding, done) {
        written.push(String(chunk));
        release = done;
      },
    });
    let gone = 0;
    const output = new Output(slow, new PassThrough(), () => gone++);
    const first = output.write('first');
    let returned = false;
    first.then(() => {
      returned = true;
    });
    await new Promise((resolve) => setImmediate(resolve));
    expect(returned).toBe(false);
    release();
    await first;
    const second = output.write('second');
    slow.destroy(Object.assign(new Error('EPIPE'), { code: 'EPIPE' }));
    await second;
    expect(gone).toBe(1);
    await output.write('third');
    expect(written).toEqual(['first', 'second']);
  });

  it('blames stdout for what fails on stdout', async () => {
    const full = new Writable({
      write(_chunk, _encoding, done) {
        done(Object.assign(new Error('ENOSPC: no space left on device, write'), { code: 'ENOSPC', syscall: 'write' }));
      },
    });
    const thrown = new Promise((resolve) => process.once('uncaughtException', resolve));
    const before = process.listeners('uncaughtException').slice(0, -1) as NodeJS.UncaughtExceptionListener[];
    for (const listener of before) process.off('uncaughtException', listener);
    try {
      new Output(full, new PassThrough(), () => {}).write('text');
      const error = await thrown;
      expect(reportOf(error)).toMatchObject({ code: 'CLI_OUTPUT', exit: 1, hint: expect.stringContaining('stdout') });
    } finally {
      for (const listener of before) process.on('uncaughtException', listener);
    }
  });

  it('prints big integers as numbers', async () => {
    const stdout = new PassThrough();
    await new Output(stdout, new PassThrough(), () => {}).json({ size: 5n });
    expect(String(stdout.read())).toBe('{"size":5}\n');
  });
});
