/** The queue of the image service over HTTP: one job for the same work, restarts, cancelling, watching, limits. */
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, describe, expect, it } from 'vitest';
import { digestOf } from '#base';
import { fail } from '../errors.ts';
import { parseEvents } from '../server/client.ts';
import { type JobView, jobId } from '../server/jobs/job.ts';
import { JobEvents } from '../server/jobs/job-events.ts';
import { Tokens } from '../server/tokens.ts';
import { HandRunner, ServiceFixture } from './service-fixture.ts';
import { collected, someBytes } from './store-conformance.ts';

let fixture: ServiceFixture;
afterEach(() => fixture?.stop());

const wish = { source: 'docker://registry.example/web:1', name: 'web:1' };
const post = (body: object = wish, headers: Record<string, string> = {}) =>
  fixture.ask('/v1/convert', { method: 'POST', body, headers });
const cancel = (id: string) => fixture.ask(`/v1/jobs/${id}`, { method: 'DELETE' });
const stateFile = (id: string) => join(fixture.root, 'state/jobs', `${id}.json`);

describe('asking for a job', () => {
  it('is the same job while it waits and runs, however the fields are ordered', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner });
    const first = await post();
    expect([first.status, first.json.state]).toEqual([202, 'queued']);
    expect(first.headers.location).toBe(`/v1/jobs/${first.json.id}`);
    const again = await post({ name: 'web:1', source: wish.source });
    expect([again.status, again.json.id]).toEqual([200, first.json.id]);
    // The tag is latest where there is none.
    expect((await post({ ...wish, name: 'web' })).json.id).not.toBe(first.json.id);
    const [a, b] = await Promise.all([post({ ...wish, name: 'c:1' }), post({ ...wish, name: 'c:1' })]);
    expect(a.json.id).toBe(b.json.id);
    expect([a.status, b.status].sort()).toEqual([200, 202]);
    await runner.job(first.json.id);
    expect(runner.started.filter((id) => id === first.json.id)).toHaveLength(1);
  });

  it('is the same job when it is done: as it is where the result still holds, else done again', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner });
    const { id } = (await post()).json;
    await runner.finish(id);
    expect((await fixture.ended(id)).state).toBe('done');
    runner.holds = true;
    expect(await post()).toMatchObject({ status: 200, json: { id, state: 'done', attempt: 1 } });
    runner.holds = false;
    const [a, b] = await Promise.all([post(), post()]);
    expect([a.json.id, b.json.id]).toEqual([id, id]);
    expect([a.status, b.status].sort()).toEqual([200, 202]);
    await runner.finish(id);
    expect(await fixture.ended(id)).toMatchObject({ state: 'done', attempt: 2 });
    expect(runner.started).toEqual([id, id]);
  });

  it('never starts again what the same Idempotency-Key has started', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner });
    const key = { 'idempotency-key': 'pipeline-17' };
    const { id } = (await post(wish, key)).json;
    await runner.fail(id, fail('CONVERT_NO_LAYERS', { source: 'x' }));
    const ended = await fixture.ended(id);
    expect(ended).toMatchObject({ state: 'failed', error: { code: 'CONVERT_NO_LAYERS', exit: 3, retryable: false } });
    expect(await post(wish, key)).toMatchObject({ status: 200, json: { id, state: 'failed' } });
    expect(await post(wish, { 'idempotency-key': 'pipeline-18' })).toMatchObject({ status: 202, json: { attempt: 2 } });
  });

  it('forgets credentials when the job ends, and shows them to nobody', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner });
    const { id, ...view } = (await post({ ...wish, credentials: 'user:sesame' })).json;
    expect(id).not.toBe((await post()).json.id);
    expect(JSON.stringify(view)).not.toContain('sesame');
    await runner.job(id);
    expect(readFileSync(stateFile(id), 'utf8')).toContain('sesame');
    expect(statSync(stateFile(id)).mode & 0o777).toBe(0o600);
    expect(statSync(join(fixture.root, 'state/jobs')).mode & 0o777).toBe(0o700);
    await runner.finish(id);
    expect(JSON.stringify(await fixture.ended(id))).not.toContain('sesame');
    await expect.poll(() => readFileSync(stateFile(id), 'utf8')).not.toContain('sesame');
  });

  it('gives no two works the same id', () => {
    const ids = [
      jobId({ kind: 'convert', request: wish }, undefined),
      jobId({ kind: 'convert', request: { ...wish, insecure: true } }, undefined),
      jobId({ kind: 'convert', request: wish }, 'a:b'),
      jobId({ kind: 'pack-diff', request: { upper: '/u', image: 'a', name: 'web:1' } }, undefined),
    ];
    expect(new Set(ids).size).toBe(4);
    expect(jobId({ kind: 'convert', request: { ...wish, platform: undefined } }, undefined)).toBe(ids[0]);
  });
});

describe('limits', () => {
  it('runs a bounded number at once, and lets callers take turns', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner, limits: { concurrency: 2 } });
    const submit = async (caller: string, name: string) =>
      (await fixture.service.queue.submit({ work: { kind: 'convert', request: { ...wish, name } }, caller })).job.id;
    const a = [await submit('a', 'a:1'), await submit('a', 'a:2'), await submit('a', 'a:3'), await submit('a', 'a:4')];
    const b = await submit('b', 'b:1');
    await expect.poll(() => runner.started).toEqual([a[0], a[1]]);
    await runner.finish(a[0]!);
    await runner.job(b);
    await expect.poll(() => runner.started).toEqual([a[0], a[1], b]);
    await runner.finish(b);
    await runner.job(a[2]!);
    await expect
      .poll(() => fixture.service.queue.counts())
      .toEqual({ queued: 1, running: 2, done: 2, failed: 0, cancelled: 0 });
  });

  it('refuses a caller who has too many, with 429, and others go on', async () => {
    fixture = await ServiceFixture.start({ runner: new HandRunner(), limits: { jobsPerCaller: 2 } });
    await post({ ...wish, name: 'a:1' });
    await post({ ...wish, name: 'a:2' });
    const refused = await post({ ...wish, name: 'a:3' });
    expect(refused).toMatchObject({ status: 429, json: { error: { code: 'SERVER_TOO_MANY_JOBS', retryable: true } } });
    expect(refused.headers['retry-after']).toBe('2');
    // What is there already is no new job.
    expect((await post({ ...wish, name: 'a:1' })).status).toBe(200);
    expect(readdirSync(join(fixture.root, 'state/jobs')).filter((name) => name.endsWith('.json'))).toHaveLength(2);
  });
});

describe('a restart', () => {
  it('queues again what ran and what waited, and keeps what had ended', async () => {
    const first = new HandRunner();
    fixture = await ServiceFixture.start({ runner: first, limits: { concurrency: 1 } });
    const done = (await post({ ...wish, name: 'done:1' })).json.id;
    await first.finish(done);
    await fixture.ended(done);
    const ran = (await post({ ...wish, name: 'ran:1' })).json.id;
    const waited = (await post({ ...wish, name: 'waited:1' })).json.id;
    await first.job(ran);
    await fixture.service.close(0);
    expect(JSON.parse(readFileSync(stateFile(ran), 'utf8'))).toMatchObject({ state: 'queued', crashes: 0 });

    const second = new HandRunner();
    await fixture.open({ runner: second });
    expect(fixture.service.queue.get(done)).toMatchObject({ state: 'done', attempt: 1 });
    await second.finish(ran);
    await second.finish(waited);
    expect(await fixture.ended(ran)).toMatchObject({ state: 'done', attempt: 2 });
    expect(await fixture.ended(waited)).toMatchObject({ state: 'done', attempt: 2 });
    expect(second.started).toEqual([ran, waited]);
  });

  it('gives up a job that has seen three processes die, cancels one that was to be, and skips what is no job', async () => {
    fixture = await ServiceFixture.start({ runner: new HandRunner() });
    const { id } = (await post()).json;
    const other = (await post({ ...wish, name: 'b:1' })).json.id;
    await fixture.service.close(0);
    const edit = (path: string, change: object) =>
      writeFileSync(path, JSON.stringify({ ...JSON.parse(readFileSync(path, 'utf8')), ...change }));
    edit(stateFile(id), { state: 'running', crashes: 2 });
    edit(stateFile(other), { state: 'running', cancelling: true });
    writeFileSync(join(fixture.root, 'state/jobs', `${'a'.repeat(24)}.json`), '{"half":');
    writeFileSync(join(fixture.root, 'state/jobs', `.${'a'.repeat(24)}.tmp`), '{"half":');
    await fixture.open();
    const [gone, cancelled] = [fixture.service.queue.get(id), fixture.service.queue.get(other)];
    expect(gone).toMatchObject({ state: 'failed', error: { code: 'SERVER_JOB_CRASHED' } });
    expect(cancelled.state).toBe('cancelled');
    expect(readdirSync(join(fixture.root, 'state/jobs')).filter((name) => name.startsWith('.'))).toEqual([]);
    expect(fixture.service.queue.list()).toHaveLength(2);
  });

  it('is refused while another service has the folder', async () => {
    fixture = await ServiceFixture.start();
    const { service } = fixture;
    await expect(fixture.open()).rejects.toMatchObject({ code: 'SERVER_STATE_BUSY' });
    fixture.service = service;
  });
});

describe('cancelling', () => {
  it('ends a waiting job at once and a running one when it has stopped; an ended one is 409', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner, limits: { concurrency: 1 } });
    const running = (await post({ ...wish, name: 'a:1' })).json.id;
    const waiting = (await post({ ...wish, name: 'b:1' })).json.id;
    await runner.job(running);
    expect(await cancel(waiting)).toMatchObject({ status: 200, json: { state: 'cancelled' } });
    expect(await cancel(running)).toMatchObject({ status: 202, json: { state: 'running', cancelling: true } });
    expect((await fixture.ended(running)).state).toBe('cancelled');
    expect(await cancel(running)).toMatchObject({ status: 409, json: { error: { code: 'SERVER_JOB_ENDED' } } });
    expect((await cancel('nothing')).status).toBe(404);
    expect(runner.started).toEqual([running]);
    // Asking again starts it anew.
    expect(await post({ ...wish, name: 'a:1' })).toMatchObject({ status: 202, json: { id: running, attempt: 2 } });
  });

  it('is for whoever asked, or an admin', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-tokens-'));
    const file = join(folder, 'tokens');
    const lines = ['ann write', 'bob write', 'root admin'].map((who) => `${who} ${digestOf(who.split(' ')[0]!)}\n`);
    writeFileSync(file, lines.join(''));
    fixture = await ServiceFixture.start({ runner: new HandRunner(), tokens: new Tokens({ file }) });
    const { id } = (await fixture.ask('/v1/convert', { method: 'POST', body: wish, token: 'ann' })).json;
    const other = await fixture.ask(`/v1/jobs/${id}`, { method: 'DELETE', token: 'bob' });
    expect(other).toMatchObject({ status: 403, json: { error: { code: 'SERVER_FORBIDDEN' } } });
    expect((await fixture.ask(`/v1/jobs/${id}`, { method: 'DELETE', token: 'root' })).status).toBeLessThan(300);
    rmSync(folder, { recursive: true });
  });

  it('leaves nothing of a real conversion', async () => {
    fixture = await ServiceFixture.start();
    // Enough that it cannot be done before it is cancelled, in several layers so that blobs are in the store by then.
    const files = Object.fromEntries(
      Array.from({ length: 60 }, (_, i) => [`f${i}`, someBytes(1_000_000, `cancel ${i}`)] as const),
    );
    const source = `dir:${fixture.tree('large', files)}`;
    const { id } = (await post({ source, name: 'large:1' })).json;
    await fixture.events(id, undefined, (event) => event.type === 'progress');
    await cancel(id);
    expect((await fixture.ended(id)).state).toBe('cancelled');
    expect(await collected(fixture.store.listBlobs())).toEqual([]);
    expect(await fixture.store.listRefs()).toEqual([]);
    expect(readdirSync(join(fixture.root, 'store/tmp'))).toEqual([]);
  });
});

describe('watching', () => {
  it('tells states and progress, ends with the job, and goes on after Last-Event-ID', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner });
    const { id } = (await post()).json;
    const { progress } = await runner.job(id);
    const first = fixture.events(id, undefined, (event) => event.type === 'progress');
    await expect.poll(() => fixture.service.queue.events(id).watchers).toBe(1);
    progress({ task: 'layer 1/2', phase: 'fetch', doneBytes: 1, totalBytes: 10 });
    const seen = await first;
    expect(seen.map(({ type }) => type)).toEqual(['state', 'progress']);
    expect(JSON.parse(seen[1]!.data)).toEqual({ task: 'layer 1/2', phase: 'fetch', doneBytes: 1, totalBytes: 10 });
    // While nobody watches:
    progress({ task: 'layer 1/2', phase: 'write' });
    progress({ task: 'layer 1/2', phase: 'write', doneBytes: 2 });
    progress({ task: 'layer 2/2', phase: 'fetch' });
    const rest = fixture.events(id, seen.at(-1)!.id);
    await expect.poll(() => fixture.service.queue.events(id).watchers).toBe(1);
    await runner.finish(id);
    const types = (await rest).map(({ type, data }) => (type === 'state' ? JSON.parse(data).state : JSON.parse(data)));
    expect(types).toEqual([{ task: 'layer 1/2', phase: 'write' }, { task: 'layer 2/2', phase: 'fetch' }, 'done']);
    const all = [...seen, ...(await rest)].map((event) => event.id);
    expect(new Set(all).size).toBe(all.length);
    // After the end: the end, once.
    const [end, ...more] = await fixture.events(id);
    expect([JSON.parse(end!.data).state, more]).toEqual(['done', []]);
    expect(await fixture.events(id, end!.id)).toEqual([]);
    expect((await fixture.ask('/v1/jobs/nothing/events')).status).toBe(404);
  });

  it('goes on over a restart: what was seen before it is not told again, what is new is', async () => {
    fixture = await ServiceFixture.start({ runner: new HandRunner() });
    const { id } = (await post()).json;
    const seen = await fixture.events(id, undefined, (event) => JSON.parse(event.data).state === 'running');
    await fixture.service.close(0);
    const runner = new HandRunner();
    await fixture.open({ runner });
    const rest = fixture.events(id, seen.at(-1)!.id);
    await runner.finish(id);
    const states = (await rest).map(({ data }) => JSON.parse(data) as JobView);
    expect(states.at(-1)).toMatchObject({ state: 'done', attempt: 2 });
    expect((await rest).every((event) => !seen.some((old) => old.id === event.id))).toBe(true);
  });

  it('lets streams end when the service shuts down', async () => {
    const runner = new HandRunner();
    fixture = await ServiceFixture.start({ runner });
    const { id } = (await post()).json;
    const watching = fixture.events(id);
    await expect.poll(() => fixture.service.queue.events(id).watchers).toBe(1);
    await fixture.service.close(0);
    expect((await watching).length).toBeGreaterThan(0);
  });

  it('keeps a bounded number of events, and gives the state where what was missed is gone', () => {
    const events = new JobEvents();
    const view = { id: 'x', attempt: 1, state: 'running' } as JobView;
    events.state(view);
    for (let i = 0; i < 1000; i++) events.progress({ task: `t${i}`, phase: 'p' }, i);
    // Progress is news of the moment: of what is not kept, nothing that lasts was missed.
    expect(events.since('1-1')).toEqual([]);
    expect(events.since('1-900').length).toBe(101);
    expect(events.since('0-7').map(({ type }) => type)).toEqual(['state']);
    expect(events.since(undefined)).toHaveLength(1);
  });
});

describe('parseEvents', () => {
  it('reads what other servers send: all line ends, comments, several data lines, pieces cut anywhere', async () => {
    const text =
      ': hi\r\nid: 1\r\nevent: state\r\ndata: a\r\ndata: b\r\n\r\ndata:c\n\nevent: none\n\nid: 2\ndata: ü\n\ndata: cut off';
    const bytes = Buffer.from(text);
    for (const size of [1, 2, 3, 1000]) {
      const got = [];
      const pieces = async function* () {
        for (let at = 0; at < bytes.length; at += size) yield bytes.subarray(at, at + size);
      };
      for await (const event of parseEvents(pieces())) got.push(event);
      expect(got).toEqual([
        { id: '1', type: 'state', data: 'a\nb' },
        { id: '1', type: 'message', data: 'c' },
        { id: '2', type: 'message', data: 'ü' },
      ]);
    }
  });
});
