/** Files of a sandbox watched from outside, on images with and without a shell. */
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import type { FileEvent, FileWatch } from '../sandbox-api/watch.ts';
import { ResidentSite, say, until } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');
const can = agent !== undefined && canRun();

/** Collects what a watch tells. */
class Seen {
  readonly events: FileEvent[] = [];
  readonly over: Promise<unknown>;
  private readonly watch: FileWatch;

  constructor(watch: FileWatch) {
    this.watch = watch;
    this.over = (async () => {
      for await (const event of watch) this.events.push(event);
    })().then(
      () => 'over',
      (error: unknown) => error,
    );
  }

  get lines(): string[] {
    return this.events.map(({ event, path, directory }) => `${event} ${path}${directory ? '/' : ''}`);
  }

  async has(...lines: string[]): Promise<void> {
    for (const line of lines)
      await until(`${line} among ${this.lines.join(', ').slice(0, 2000)}`, () => this.lines.includes(line));
  }

  close(): void {
    this.watch.close();
  }
}

describe.skipIf(!can).each(TEST_IMAGES)('watches on $name', { timeout: 120_000 }, (image) => {
  let all: ResidentSite;
  let box: NodeSandbox;
  beforeAll(async () => {
    all = await ResidentSite.open(image.name);
    box = await all.create();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  it('tell what happens in a folder, and nothing from below', async () => {
    await box.files.mkdir('/work/one/deep', { parents: true });
    const seen = new Seen(await box.watch('/work/one'));
    await box.files.write('/work/one/x', Buffer.from('content'));
    await box.files.write('/work/one/deep/hidden', Buffer.from('y'));
    await box.files.rename('/work/one/x', '/work/one/z');
    await box.files.remove('/work/one/z');
    await seen.has('removed z');
    expect(seen.lines.filter((line) => !line.startsWith('changed') && !line.startsWith('attributes'))).toEqual([
      'made x',
      'written x',
      'moved-from x',
      'moved-to z',
      'removed z',
    ]);
    const [from, to] = seen.events.filter(({ event }) => event.startsWith('moved'));
    expect(from!.cookie).toBe(to!.cookie);
    seen.close();
    expect(await seen.over).toBe('over');
  });

  it('with all below: new folders, moved ones, and what was put into them at once', async () => {
    await box.files.mkdir('/work/tree/a/b', { parents: true });
    const seen = new Seen(await box.watch('/work/tree', { recursive: true }));
    await box.files.write('/work/tree/a/b/x', Buffer.from('1'));
    await seen.has('written a/b/x');
    await box.files.mkdir('/work/tree/n/m/o', { parents: true });
    await seen.has('made n/', 'made n/m/', 'made n/m/o/');
    await box.files.write('/work/tree/n/m/o/late', Buffer.from('1'));
    await seen.has('written n/m/o/late');
    await box.files.rename('/work/tree/a', '/work/tree/moved');
    await seen.has('moved-from a/', 'moved-to moved/');
    await box.files.write('/work/tree/moved/b/y', Buffer.from('1'));
    await seen.has('written moved/b/y');
    await box.files.rename('/work/tree/moved', '/work/away');
    await box.files.write('/work/away/b/unseen', Buffer.from('1'));
    await box.files.mkdir('/work/tree/last');
    await seen.has('made last/');
    expect(seen.lines.some((line) => line.includes('unseen'))).toBe(false);
    seen.close();
  });

  it('of a file, and of what goes', async () => {
    await box.files.write('/work/file', Buffer.from('1'));
    const seen = new Seen(await box.watch('/work/file'));
    await box.files.write('/work/file', Buffer.from('2'));
    await seen.has('written ');
    await box.files.remove('/work/file');
    expect(await seen.over).toBe('over');
    expect(seen.lines.at(-1)).toBe('gone ');
    await expect(box.watch('/work/file')).rejects.toMatchObject({ code: 'RUNTIME_FILE', params: { code: 'ENOENT' } });
    await expect(box.watch('a\0b')).rejects.toMatchObject({ code: 'RUNTIME_FILE' });
    const folder = new Seen(await box.watch('/work/away', { recursive: true }));
    await box.files.remove('/work/away', { recursive: true });
    await folder.has('removed b/', 'gone ');
  });

  it.skipIf(image.name !== 'busybox')(
    'say that something is missing when more happens than the kernel keeps',
    async () => {
      await box.files.mkdir('/work/busy');
      const watch = await box.watch('/work/busy');
      // Nobody reads: what may be ahead fills, then the kernel's queue does.
      const name = 'n'.repeat(200);
      await say(box, `cd /work/busy; i=0; while [ $i -lt 12000 ]; do : > ${name}$i; i=$((i+1)); done`);
      const seen = new Seen(watch);
      await seen.has('overflow ');
      await box.files.write('/work/busy/after', Buffer.alloc(0));
      await seen.has('made after');
      expect(seen.events.length).toBeGreaterThan(1_000);
      seen.close();
    },
  );

  it('are bounded, and closed by whoever gives up', async () => {
    await box.files.mkdir('/work/many');
    const watches = await Promise.all(Array.from({ length: 20 }, () => box.watch('/work/many')));
    const more = await Promise.allSettled(Array.from({ length: 20 }, () => box.watch('/work/many')));
    const refused = more.filter((one) => one.status === 'rejected');
    expect(refused.length).toBeGreaterThan(0);
    for (const one of refused) expect(one.reason).toMatchObject({ code: 'RUNTIME_WATCH_LIMIT' });
    for (const one of watches) one.close();
    for (const one of more) if (one.status === 'fulfilled') one.value.close();
    const stop = new AbortController();
    const again = new Seen(await box.watch('/work/many', { signal: stop.signal }));
    stop.abort(new Error('enough'));
    expect(await again.over).toMatchObject({ message: 'enough' });
  });

  it.skipIf(!image.hasShell)('follow a tree that is made and removed as fast as it can be', async () => {
    await box.files.mkdir('/work/race');
    const seen = new Seen(await box.watch('/work/race', { recursive: true }));
    await say(
      box,
      'cd /work/race; for i in 1 2 3 4 5 6 7 8 9; do mkdir -p a/b/c/d; echo x > a/b/c/d/f; rm -rf a; done; mkdir -p k/l; echo x > k/l/kept',
    );
    await seen.has('made k/', 'made k/l/', 'made k/l/kept');
    await box.files.write('/work/race/k/l/new', Buffer.from('x'));
    await seen.has('written k/l/new');
    seen.close();
  });

  it('end with the service that had them, and with the sandbox', async () => {
    const short = await all.create();
    const seen = new Seen(await short.watch('/'));
    await short.stop({ timeMs: 0 });
    expect(await seen.over).toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
    await box.watch('/work', { recursive: true });
    await all.restart();
    box = all.node.get(box.name);
    const fresh = new Seen(await box.watch('/work'));
    await delay(1);
    await box.files.write('/work/again', Buffer.from('x'));
    await fresh.has('written again');
    fresh.close();
  });
});
