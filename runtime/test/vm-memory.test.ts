/** Memory of machines in layers, and taken out of QEMU's stream. */
import { createHash } from 'node:crypto';
import { mkdtempSync, openSync, readFileSync, rmSync, truncateSync, writeFileSync, writeSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { openStack } from '#ublk-daemon';
import { readMemoryInto, writeMemoryLayer } from '../vm/snapshot/memory-layer.ts';
import { RamStream } from '../vm/snapshot/ram-stream.ts';
import { openMemory, readSnapshot, snapshotError } from '../vm/snapshot/snapshot-folder.ts';

const MIB = 2 ** 20;
const PAGE = 4096;
let folder: string;

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-memory-'));
});
afterEach(() => rmSync(folder, { recursive: true }));

function makeRandom(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (state * 1103515245 + 12345) % 2 ** 31;
    return state % below;
  };
}

const sha256 = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex');

async function written(layers: readonly string[], bytes: number): Promise<Buffer> {
  const path = join(folder, 'out');
  writeFileSync(path, '');
  truncateSync(path, bytes);
  const stack = await openStack(layers);
  const file = await open(path, 'r+');
  await readMemoryInto(file, stack);
  await file.close();
  await stack.close();
  return readFileSync(path);
}

test('each snapshot stores what changed since the one before, and all of them read as the memory was', async () => {
  const bytes = 6 * MIB;
  const memory = join(folder, 'memory');
  writeFileSync(memory, '');
  truncateSync(memory, bytes);
  const fd = openSync(memory, 'r+');
  const random = makeRandom(7);
  const layers: string[] = [];
  const past: { layers: string[]; sha256: string }[] = [];
  for (let round = 0; round < 8; round++) {
    const changed = new Set<number>();
    for (let i = 0; i < 40; i++) {
      const page = random(bytes / PAGE);
      changed.add(page);
      writeSync(fd, random(3) === 0 ? Buffer.alloc(PAGE) : Buffer.alloc(PAGE, 1 + random(255)), 0, PAGE, page * PAGE);
    }
    const base = layers.length === 0 ? undefined : await openStack(layers);
    const path = join(folder, `layer-${round}`);
    const facts = await writeMemoryLayer(path, memory, bytes, base);
    await base?.close();
    expect(facts.changedPages).toBeLessThanOrEqual(changed.size);
    expect(facts.sizeBytes).toBeLessThan(changed.size * PAGE + 64 * 1024);
    layers.push(path);
    past.push({ layers: [...layers], sha256: sha256(readFileSync(memory)) });
  }
  for (const one of past) expect(sha256(await written(one.layers, bytes))).toBe(one.sha256);
  // Nothing changed: nothing stored.
  const base = await openStack(layers);
  expect(await writeMemoryLayer(join(folder, 'same'), memory, bytes, base)).toMatchObject({ changedPages: 0 });
  await base.close();
});

test('a damaged snapshot is named', async () => {
  await expect(readSnapshot(folder)).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
  for (const text of [
    '',
    '{',
    'null',
    '{"version":2}',
    '{"version":1}',
    '{"version":1,"memoryBytes":1,"stateBytes":1}',
  ]) {
    writeFileSync(join(folder, 'snapshot.json'), text);
    await expect(readSnapshot(folder), text).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
  }
  const record = { version: 1, machine: 'x', memoryBytes: 2 * MIB, stateBytes: 1, layers: ['memory.lsmt'] };
  writeFileSync(join(folder, 'snapshot.json'), JSON.stringify(record));
  await expect(openMemory(await readSnapshot(folder))).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
  writeFileSync(join(folder, 'memory.lsmt'), Buffer.alloc(3 * PAGE, 7));
  await expect(openMemory(await readSnapshot(folder))).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
});

test('a host that is short of something has no damaged snapshots', () => {
  const short = Object.assign(new Error('too many open files'), { code: 'EMFILE' });
  expect(snapshotError('/s', new Error('cannot open', { cause: short }))).toBe(short);
  const gone = Object.assign(new Error('no such file'), { code: 'ENOENT' });
  expect(snapshotError('/s', gone)).toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED', cause: gone });
});

describe('the stream of state', () => {
  const u64 = (value: number) => {
    const bytes = Buffer.alloc(8);
    bytes.writeBigUInt64BE(BigInt(value));
    return bytes;
  };
  const name = (text: string) => Buffer.concat([Buffer.from([text.length]), Buffer.from(text)]);
  const section = (kind: number) => Buffer.from([kind, 0, 0, 0, 2]);
  const footer = Buffer.from([0x7e, 0, 0, 0, 2]);
  const head = Buffer.concat([
    Buffer.from('QEVM\0\0\0\x03\x07\0\0\0\x04q35!', 'latin1'),
    section(1),
    Buffer.from('\x03ram\0\0\0\0\0\0\0\x04', 'latin1'),
    u64(3 * MIB + 0x04),
    ...[name('ram'), u64(2 * MIB), u64(0), name('vga'), u64(MIB), u64(9)],
    u64(0x10),
    footer,
  ]);
  const page = (offset: number, value: number, block?: string) => [
    u64(offset + 0x08 + (block === undefined ? 0x20 : 0)),
    ...(block === undefined ? [] : [name(block)]),
    Buffer.alloc(PAGE, value),
  ];
  const zero = (offset: number, block?: string) => [
    u64(offset + 0x02 + (block === undefined ? 0x20 : 0)),
    ...(block === undefined ? [] : [name(block)]),
    Buffer.from([0]),
  ];
  const devices = Buffer.from('\x04\0\0\0\x05devices, whatever they are, ram too', 'latin1');
  const whole = Buffer.concat([
    head,
    section(2),
    ...page(0, 1, 'ram'),
    ...page(PAGE, 2),
    ...zero(2 * PAGE),
    ...page(0, 3, 'vga'),
    ...page(5 * PAGE, 4, 'ram'),
    u64(0x10),
    footer,
    section(3),
    ...page(6 * PAGE, 5, 'ram'),
    u64(0x10),
    footer,
    devices,
  ]);
  const without = Buffer.concat([
    head,
    section(2),
    ...page(0, 3, 'vga'),
    u64(0x10),
    footer,
    section(3),
    u64(0x10),
    footer,
    devices,
  ]);

  async function through(bytes: Buffer, step: number): Promise<{ out: Buffer; pages: Map<number, number> }> {
    const pages = new Map<number, number>();
    const stream = new RamStream({ page: (offset, content) => pages.set(offset, content[0]!) }, 2 * MIB);
    const parts: Buffer[] = [];
    stream.on('data', (part: Buffer) => parts.push(part));
    const ended = new Promise<void>((resolve, reject) => {
      stream.once('end', resolve);
      stream.once('error', reject);
    });
    for (let at = 0; at < bytes.length; at += step) stream.write(bytes.subarray(at, at + step));
    stream.end();
    await ended;
    return { out: Buffer.concat(parts), pages };
  }

  test.each([1, 7, 4096, 1 << 20])('loses the pages of memory and nothing else, in parts of %i bytes', async (step) => {
    const { out, pages } = await through(whole, step);
    expect(out.equals(without)).toBe(true);
    expect([...pages]).toEqual([
      [0, 1],
      [PAGE, 2],
      [5 * PAGE, 4],
      [6 * PAGE, 5],
    ]);
  });

  test('one that is cut off inside the memory is an error', async () => {
    for (let end = 0; end < whole.length - devices.length; end += 1501) {
      await expect(through(whole.subarray(0, end), 4096), String(end)).rejects.toThrow();
    }
  });

  test('pages outside the memory, of other forms, and whatever a fuzzer makes: an error or an end, no more', async () => {
    const outside = Buffer.concat([head, section(2), ...page(2 * MIB, 1, 'ram')]);
    await expect(through(outside, 4096)).rejects.toThrow('outside the memory');
    const random = makeRandom(3);
    for (let round = 0; round < 60; round++) {
      const bytes = Buffer.from(whole);
      for (let i = 0; i < 3; i++) bytes[random(bytes.length)] = random(256);
      const cut = bytes.subarray(0, random(bytes.length));
      const { pages } = await through(cut, 2048).catch(() => ({ pages: new Map<number, number>() }));
      for (const offset of pages.keys()) expect(offset + PAGE).toBeLessThanOrEqual(2 * MIB);
    }
  });
});
