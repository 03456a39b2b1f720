/** Advice about the memory of another process: what is mapped from a file goes, and comes back as it was. */
import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { describe, expect, it } from 'vitest';
import { adviseProcess, mappingsOf } from '../process-memory.ts';
import { coreSchedulingMissing, isScheduledWhenIdle, scheduleWhenIdle, takeCoreAlone } from '../scheduling.ts';
import { swapSpace } from '../swap.ts';

const isRoot = process.getuid?.() === 0;
const hasPython = spawnSync('python3', ['-c', '']).status === 0;
if (!isRoot || !hasPython) console.log('skipped: not root, or no python3');

const BYTES = 8 << 20;

/** Maps a file, reads all of it, says so, and waits; then reads it again and tells its sum. */
const PROGRAM = `
import mmap, sys
file = open(sys.argv[1], 'rb')
view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
total = lambda: sum(view[at] for at in range(0, len(view), 4096))
print(total(), flush=True)
sys.stdin.readline()
print(total(), flush=True)
`;

describe.skipIf(!isRoot || !hasPython)('memory of another process', { timeout: 60_000 }, () => {
  it('is taken from it, told, and read back', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-memory-'));
    const path = join(folder, 'data');
    const bytes = Buffer.alloc(BYTES);
    for (let at = 0; at < BYTES; at += 4096) bytes[at] = (at >> 12) % 251;
    writeFileSync(path, bytes);
    const child = spawn('python3', ['-c', PROGRAM, path], { stdio: ['pipe', 'pipe', 'inherit'] });
    const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
    const line = async () => (await lines.next()).value as string;
    try {
      const first = await line();
      const pid = child.pid!;
      const resident = () => {
        const text = readFileSync(`/proc/${pid}/smaps`, 'latin1');
        const part = text.slice(text.indexOf(path));
        return Number(/^Rss: +(\d+) kB/m.exec(part)![1]) * 1024;
      };
      expect(resident()).toBeGreaterThanOrEqual(BYTES);
      const ranges = await mappingsOf(pid);
      expect(ranges.some((range) => range.bytes === BYTES)).toBe(true);
      expect((await mappingsOf(pid, { swap: true })).map(({ from }) => from)).toEqual(ranges.map(({ from }) => from));
      // All that it has, those too that take no advice.
      expect(await adviseProcess(pid, ranges, 'pageout')).toBeGreaterThanOrEqual(BYTES);
      expect(resident()).toBeLessThan(BYTES / 10);
      const file = ranges.filter((range) => range.bytes === BYTES);
      expect(await adviseProcess(pid, file, 'willneed')).toBe(BYTES);
      const stop = new AbortController();
      stop.abort();
      expect(await adviseProcess(pid, ranges, 'pageout', stop.signal)).toBe(0);
      const second = line();
      child.stdin.write('\n');
      expect(await second).toBe(first);
    } finally {
      child.kill('SIGKILL');
      rmSync(folder, { recursive: true, force: true });
    }
  });

  it('of one that has gone is nothing', async () => {
    const child = spawn('true');
    await new Promise((done) => child.once('close', done));
    expect(await mappingsOf(child.pid!)).toEqual([]);
    expect(await adviseProcess(child.pid!, [{ from: 4096, bytes: 4096, swappedBytes: 0 }], 'pageout')).toBe(0);
  });

  it('goes to swap where there is some', () => {
    const { places, totalBytes, freeBytes } = swapSpace();
    expect(readFileSync('/proc/swaps', 'latin1').trim().split('\n').length - 1).toBe(places.length);
    expect(freeBytes).toBeLessThanOrEqual(totalBytes);
  });

  it('and a process is scheduled when nothing else wants to run', async () => {
    const child = spawn('sleep', ['1000']);
    try {
      const pid = child.pid!;
      expect(isScheduledWhenIdle(pid)).toBe(false);
      scheduleWhenIdle(pid);
      expect(isScheduledWhenIdle(pid)).toBe(true);
      expect(takeCoreAlone(pid)).toBe(coreSchedulingMissing());
    } finally {
      child.kill('SIGKILL');
    }
  });
});
