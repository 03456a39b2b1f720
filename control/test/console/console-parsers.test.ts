/** What the page reads of streams and addresses, held against what the server writes; without a browser. */
import { describe, expect, it } from 'vitest';
import { parseOutput } from '../../console/web/api/output-frames.js';
import { parseEvents } from '../../console/web/api/sse-parser.js';
import { shown } from '../../console/web/dom/element.js';
import { amount, amountOf, bytes, percent } from '../../console/web/format/amounts.js';
import { duration, until } from '../../console/web/format/times.js';
import { placeOf, placeTo } from '../../console/web/router.js';
import { treeOf } from '../../console/web/state/project-tree.js';
import { filtered, sandboxOf } from '../../console/web/state/sandbox.js';
import { outputFrame } from '../../runtime-service/output-frames.ts';
import { HOSTILE } from './made-cluster.ts';

/** In pieces of one size, as a network may cut it. */
async function* pieces(all: Buffer, size: number): AsyncGenerator<Uint8Array> {
  for (let at = 0; at < all.length; at += size) yield all.subarray(at, at + size);
}

async function gathered<T>(items: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
}

describe('output frames', () => {
  const result = { exitCode: 3, timedOut: false, outOfMemory: false, stdoutBytes: 1, stderrBytes: 2, durationMs: 4 };
  const stream = Buffer.concat([
    outputFrame.part({ stream: 'stdout', offset: 5, bytes: Buffer.from('hello') }),
    outputFrame.part({ stream: 'stderr', offset: 2 ** 40, bytes: Buffer.from([0, 255]) }),
    outputFrame.part({ stream: 'stdout', offset: 10, missingBytes: 2 ** 33 }),
    outputFrame.result(result),
    outputFrame.error({ code: 'X', message: 'gone' }),
  ]);

  it.each([1, 2, 7, 4096])('are read as the server writes them, cut into pieces of %i', async (size) => {
    const news = await gathered(parseOutput(pieces(stream, size)));
    expect(news.map((one) => (one.kind === 'bytes' ? { ...one, bytes: [...one.bytes] } : one))).toEqual([
      { kind: 'bytes', stream: 'stdout', offset: 5, bytes: [...Buffer.from('hello')] },
      { kind: 'bytes', stream: 'stderr', offset: 2 ** 40, bytes: [0, 255] },
      { kind: 'missing', stream: 'stdout', offset: 10, missingBytes: 2 ** 33 },
      { kind: 'result', result },
      { kind: 'error', error: { code: 'X', message: 'gone' } },
    ]);
  });

  it('that are none are refused, not waited for', async () => {
    const huge = Buffer.from([255, 255, 255, 255, 1]);
    await expect(gathered(parseOutput(pieces(huge, 5)))).rejects.toThrow('a frame of');
    const unknown = Buffer.from([0, 0, 0, 0, 9]);
    await expect(gathered(parseOutput(pieces(unknown, 5)))).rejects.toThrow('kind 9');
  });
});

describe('server-sent events', () => {
  const text =
    ': hello\n\nevent: sandbox.created\nid: 4\ndata: {"a":\ndata: "ü"}\n\nretry: 1\n\ndata:x\r\n\r\ndata: cut';
  it.each([1, 3, 1000])('are read in pieces of %i', async (size) => {
    expect(await gathered(parseEvents(pieces(Buffer.from(text), size)))).toEqual([
      { event: 'sandbox.created', id: '4', data: '{"a":\n"ü"}' },
      { event: 'message', id: undefined, data: 'x' },
    ]);
  });
});

it('addresses name any name, and come back as they were', () => {
  for (const name of [HOSTILE, 'a/b:c', 'ü', '100%', '..', '#?&']) {
    const { view, name: back, query } = placeOf(placeTo('images', name, { tab: 'x&y' }));
    expect([view, back, query.get('tab')]).toEqual(['images', name, 'x&y']);
  }
  expect(placeOf('#/sandboxes/%zz')).toMatchObject({ view: 'sandboxes', name: '%zz' });
  expect(placeOf('')).toMatchObject({ view: 'nodes', name: undefined });
});

it('characters that hide or turn others are written out', () => {
  expect(shown('\u202Egnp.exe\x1b[0m\u200b')).toBe('\\u202egnp.exe\\u001b[0m\\u200b');
  expect(shown('naïve\tλ\n')).toBe('naïve\tλ\n');
});

it('figures are short', () => {
  expect([bytes(0), bytes(1023), bytes(1536), bytes(undefined)]).toEqual(['0 B', '1 KiB', '1.5 KiB', '–']);
  expect([amount(1, 'cores'), amount(1500, 'milli'), amount(12_345, 'count')]).toEqual([
    '1 core',
    '1.5 cores',
    '12,345',
  ]);
  expect(amountOf(2 ** 29, 2 ** 30, 'bytes')).toBe('512 MiB of 1 GiB');
  expect(amountOf(0.5, 1, 'cores', '/')).toBe('0.5 / 1 core');
  expect([percent(0), percent(0.001), percent(0.505), percent(undefined)]).toEqual(['0 %', '<1 %', '51 %', '–']);
  expect([duration(900), duration(61_000), duration(90_000_000), until(5, 10)]).toEqual([
    '900 ms',
    '1m 1s',
    '1d 1h',
    'due',
  ]);
});

it('a sandbox is found by its parts; a dot in its name is none of its node', () => {
  const row = sandboxOf({ id: 'a.b.edge-1', state: 'running', project: 'root/team/run', user: 'ana', createdAt: 1 });
  expect(row).toMatchObject({ name: 'a.b', edge: 'edge-1' });
  expect(filtered([row], { project: 'root/team' })).toHaveLength(1);
  expect(filtered([row], { project: 'root/tea' })).toHaveLength(0);
  expect(filtered([row], { text: 'ANA edge-1' })).toHaveLength(1);
});

it('projects whose parents are not to be read stand at the top', () => {
  const quotas = [{ project: 'root/a', limits: {}, used: {} }];
  const tree = treeOf([{ path: 'root/a' }, { path: 'root/a/b/c' }, { path: 'other/x' }], quotas);
  expect(tree.map(({ name, children }) => [name, children.map((child) => child.name)])).toEqual([
    ['other/x', []],
    ['root/a', ['b/c']],
  ]);
});
