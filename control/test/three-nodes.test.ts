/**
 * Three edges with real containers, each in a network namespace of its own; a watcher and two apiservers beside them, a fourth edge elsewhere. A link goes down
 * and comes again, each service is killed while sandboxes are made and commands run: no sandbox is lost or doubled, no command runs twice, what is counted
 * is what lives, and whoever asks gets an error or the right answer. An edge that is alone ends what has to end.
 */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import * as fs from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { runCommand } from './command-run.ts';
import { bundled, CLUSTER_TOKEN, canServeEdge, until } from './edge-site.ts';
import { NetworkNodes } from './network-nodes.ts';

const hasTools = ['ip', 'nsenter'].every((tool) => spawnSync(tool, ['--version']).error === undefined);
const canRun = canServeEdge && hasTools;
if (!canRun) console.log('skipped: not root, or no dsec-agent, busybox, ip or nsenter');

const root = join(import.meta.dirname, '../..');
const EDGES = ['a', 'b', 'c'];
/** Takes what the others have no room for. */
const CLOUD = 'd';

interface Answer {
  readonly status: number;
  // biome-ignore lint/suspicious/noExplicitAny: what is asked for is a test's to know
  readonly body: any;
}

describe.skipIf(!canRun)('three nodes', { timeout: 400_000 }, () => {
  let folder: string;
  let nodes: NetworkNodes;
  let program: string;
  let token = '';
  const children = new Map<string, ChildProcess>();
  const said = new Map<string, string>();
  const urls: string[] = [];
  const addresses = new Map<string, string>();
  const saved = { ...process.env };

  const start = async (name: string, words: readonly string[], env: NodeJS.ProcessEnv, ready: RegExp) => {
    const child = spawn(words[0]!, words.slice(1), { cwd: root, env, stdio: 'pipe' });
    children.set(name, child);
    said.set(name, '');
    for (const stream of [child.stdout, child.stderr]) {
      stream?.on('data', (bytes) => said.set(name, said.get(name) + bytes));
    }
    await until(`${name} serves`, () => ready.test(said.get(name)!) || child.exitCode !== null);
    if (!ready.test(said.get(name)!)) throw new Error(`${name} did not start: ${said.get(name)}`);
    return ready.exec(said.get(name)!)![1]!;
  };
  const envOf = (name: string) => ({
    ...process.env,
    DSEC_CLUSTER_TOKEN: CLUSTER_TOKEN,
    DSEC_RUN: join(folder, name, 'run'),
    DSEC_STATE: join(folder, name, 'state'),
    DSEC_CACHE: join(folder, name, 'cache'),
  });
  const serve = (name: string, ...args: string[]) =>
    start(name, [process.execPath, program, 'serve', ...args], envOf(name), /^\w+ at (http\S+)$/m);
  const serveEdge = (name: string) => {
    const limits = ['--pressure', 'cpu=1,memory=1,io=1', '--reserve', 'memory=0,disk=0'];
    const more = name === CLOUD ? ['--label', 'cloud'] : [];
    const where = [...more, '--id', name, '--listen', `${addresses.get(name)}:7071`, '--watcher', urls[0]!];
    const words = [...nodes.at(name), process.execPath, program, 'serve', 'edge', ...where, ...limits];
    return start(name, words, envOf(name), /^edge \w+ at (\S+)$/m);
  };
  const serveApi = (name: string) => {
    const database = ['--database', `sqlite:${join(folder, 'iam.db')}`, '--admin-token-file', join(folder, 'token')];
    const cloud = ['--overflow', `cloud=${join(folder, 'cloud-store')}`, '--overflow-above', '0.5'];
    return serve(name, 'apiserver', '--listen', `${nodes.here}:0`, '--watcher', urls[0]!, ...database, ...cloud);
  };
  const kill = async (name: string, signal: NodeJS.Signals = 'SIGKILL') => {
    const child = children.get(name);
    children.delete(name);
    if (child === undefined || child.exitCode !== null || child.signalCode !== null) return;
    const gone = new Promise((done) => child.once('exit', done));
    child.kill(signal);
    await gone;
  };

  const ask = async (path: string, method = 'GET', body?: object, at = 1, more: object = {}): Promise<Answer> => {
    const answer = await fetch(`${urls[at]}${path}`, {
      method,
      headers: {
        authorization: `Bearer ${token}`,
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
        ...more,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    return { status: answer.status, body: JSON.parse(await answer.text()) };
  };
  /** Again and again with the same request id, at one apiserver and the other, as clients do: until it is answered. */
  const create = async (requestId: string, more: object = {}): Promise<string> => {
    for (let tries = 0; ; tries++) {
      const asked = { image: 'bb:1', ttlMs: 3_600_000, requestId, ...more };
      const answer = await ask('/v1/sandboxes', 'POST', asked, 1 + (tries % 2)).catch(() => undefined);
      if (answer?.status === 201) return answer.body.id as string;
      if (answer !== undefined && !answer.body.error.retryable) throw new Error(JSON.stringify(answer.body));
      if (tries > 300) throw new Error(`${requestId}: ${JSON.stringify(answer?.body)}`);
      await new Promise((go) => setTimeout(go, 200));
    }
  };
  const serveWatcher = async (listen: string) =>
    serve('watcher', 'watcher', '--listen', listen, '--poll', '300ms', '--dead', '2s');
  /** A line more in a file of it, by an operation that is asked for again until it is answered. */
  const append = async (id: string, operation: string): Promise<void> => {
    const body = { args: ['sh', '-c', `echo ${operation} >> /lines`] };
    for (let tries = 0; ; tries++) {
      const headers = { 'x-dsec-operation': operation };
      const path = `/v1/sandboxes/${id}/commands`;
      const answer = await ask(path, 'POST', body, 1 + (tries % 2), headers).catch(() => undefined);
      if (answer?.status === 201) return;
      if (answer !== undefined && !answer.body.error.retryable) throw new Error(JSON.stringify(answer.body));
      if (tries > 300) throw new Error(`${operation}: ${JSON.stringify(answer?.body)}`);
      await new Promise((go) => setTimeout(go, 200));
    }
  };
  const lines = async (id: string): Promise<string[]> => {
    const path = `/v1/sandboxes/${id}/files?path=/lines`;
    const answer = await fetch(`${urls[2]}${path}`, { headers: { authorization: `Bearer ${token}` } });
    return (await answer.text()).trim().split('\n').sort();
  };
  const exec = (id: string) => ask(`/v1/sandboxes/${id}/commands`, 'POST', { args: ['true'] }, 2);
  const listed = async (at = 2): Promise<string[]> => {
    const { body } = await ask('/v1/sandboxes', 'GET', undefined, at);
    return body.sandboxes.map(({ id }: { id: string }) => id).sort();
  };
  const used = async () => (await ask('/v1/quotas', 'GET', undefined, 2)).body.quotas[0].used.sandboxes as number;
  const alive = async (at = 2): Promise<string[]> => {
    const { body } = await ask('/v1/nodes', 'GET', undefined, at);
    return body.nodes.filter((one: { alive: boolean }) => one.alive).map((one: { edge: string }) => one.edge);
  };
  const allAlive = () =>
    until('all edges live', async () => {
      const both = await Promise.all([alive(1), alive(2)]).catch(() => [[], []]);
      return both.every((some) => some.length === EDGES.length + 1);
    });

  beforeAll(async () => {
    folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-three-')));
    process.env.DSEC_STORE = join(folder, 'store');
    const tree = join(folder, 'tree');
    for (const path of ['bin', 'tmp']) fs.mkdirSync(join(tree, path), { recursive: true });
    fs.copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
    for (const name of ['sh', 'true', 'echo', 'cat']) fs.symlinkSync('busybox', join(tree, 'bin', name));
    await runCommand('convert', `dir:${tree}`, '--name', 'bb:1');
    program = bundled();
    nodes = new NetworkNodes();
    const all = [...EDGES, CLOUD];
    for (const [at, name] of all.entries()) addresses.set(name, nodes.add(name, at));
    urls[0] = await serveWatcher(`${nodes.here}:0`);
    await Promise.all(all.map(serveEdge));
    for (const name of ['api1', 'api2']) urls.push(await serveApi(name));
    token = fs.readFileSync(join(folder, 'token'), 'utf8').trim();
    await allAlive();
  }, 400_000);
  afterAll(async () => {
    for (const id of await listed().catch(() => []))
      await ask(`/v1/sandboxes/${id}?force=true`, 'DELETE', undefined, 2);
    for (const name of [...children.keys()]) await kill(name, 'SIGTERM');
    nodes?.remove();
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    process.env = saved;
    if (program !== undefined) fs.rmSync(program, { force: true });
    fs.rmSync(folder, { recursive: true, force: true });
  }, 400_000);

  it('keeps what is cut off, says so, and has it again when the link comes back', async () => {
    const before = await Promise.all(Array.from({ length: 6 }, (_, at) => create(`first ${at}`)));
    expect(new Set(before).size).toBe(6);
    for (const id of before) expect((await exec(id)).status).toBe(201);
    // Whichever has most: there is one there.
    const count = (edge: string) => before.filter((id) => id.endsWith(`.${edge}`)).length;
    const cut = [...EDGES].sort((one, other) => count(other) - count(one))[0]!;
    const there = before.find((id) => id.endsWith(`.${cut}`))!;
    // Some are on their way there when it happens.
    const during = Array.from({ length: 4 }, (_, at) => create(`during ${at}`));
    nodes.connected(cut, false);
    const waiting = exec(there);
    // By both: one that does not know it yet may choose it, and then waits for it alone.
    await until('it is known to be away', async () => ![...(await alive(1)), ...(await alive(2))].includes(cut));
    expect(await waiting).toMatchObject({
      status: 503,
      body: { error: { code: 'EDGE_UNREACHABLE', retryable: true } },
    });
    const after = await Promise.all(Array.from({ length: 4 }, (_, at) => create(`after ${at}`)));
    for (const id of after) expect(id.endsWith(`.${cut}`)).toBe(false);
    expect((await ask('/v1/sandboxes', 'GET', undefined, 2)).body.unreachable).toEqual([cut]);
    // Nothing of it is given back, as it lives.
    expect(await used()).toBeGreaterThanOrEqual(before.length + after.length);
    nodes.connected(cut, true);
    await allAlive();
    const all = [...before, ...after, ...(await Promise.all(during))].sort();
    expect(new Set(all).size).toBe(14);
    expect(await listed()).toEqual(all);
    for (const id of all) expect((await exec(id)).status).toBe(201);
    await until('what counts is what lives', async () => (await used()) === all.length);
  });

  /** Starts it anew, where it was. */
  const again = async (name: string): Promise<void> => {
    if (name === 'watcher') urls[0] = await serveWatcher(new URL(urls[0]!).host);
    else if (name === 'api1') urls[1] = await serveApi('api1');
    else await serveEdge(name);
  };

  it.each(['b', 'api1', 'watcher'])('loses none and doubles none when %s is killed under it', async (victim) => {
    const before = await listed();
    const asked = Array.from({ length: 5 }, (_, at) => create(`${victim} ${at}`));
    const operations = before.flatMap((id, at) =>
      [`${victim}-${at}-1`, `${victim}-${at}-2`].map((name) => ({ id, name })),
    );
    const appended = operations.map(({ id, name }) => append(id, name));
    await until('some are made', async () => (await listed()).length > before.length);
    await kill(victim);
    await again(victim);
    const made = await Promise.all(asked);
    await Promise.all(appended);
    await allAlive();
    expect(new Set([...before, ...made]).size).toBe(before.length + made.length);
    expect(await listed()).toEqual([...before, ...made].sort());
    for (const id of made) expect((await exec(id)).status).toBe(201);
    await until('what counts is what lives', async () => (await used()) === before.length + made.length);
    // Asked again they are the same ones.
    expect(await create(`${victim} 0`)).toBe(made[0]);
    for (const id of before) {
      const own = operations.filter((one) => one.id === id).map(({ name }) => name);
      const there = async () => (await lines(id)).filter((line) => line.startsWith(`${victim}-`));
      await until(`what ${own} write is there`, async () => new Set(await there()).size === own.length);
      expect(await there()).toEqual(own);
    }
  });

  it('has an edge end what has to end when everything else is dead, and counts it when there is somebody again', async () => {
    const before = await listed();
    const [ttl, idle] = [await create('ttl', { ttlMs: 8000 }), await create('idle', { idleMs: 4000 })];
    const killed = ['api1', 'api2', 'watcher'];
    for (const name of killed) await kill(name);
    for (const id of [ttl, idle]) {
      const [, name, edge] = /^(.*)\.(\w+)$/.exec(id)!;
      const ended = async () => {
        const url = `http://${addresses.get(edge!)}:7071/v1/roster`;
        const answer = await fetch(url, { headers: { authorization: `Bearer ${CLUSTER_TOKEN}` } });
        const roster = (await answer.json()) as { sandboxes: { name: string; state: string; end?: object }[] };
        return roster.sandboxes.find((one) => one.name === name);
      };
      await until(`${id} has ended`, async () => (await ended())?.state === 'ended');
      expect((await ended())!.end).toMatchObject({ reason: id === ttl ? 'expired' : 'idle' });
    }
    await again('watcher');
    urls[1] = await serveApi('api1');
    urls[2] = await serveApi('api2');
    await allAlive();
    expect(await listed()).toEqual(before);
    const gone = await exec(ttl);
    expect(gone).toMatchObject({ status: 410, body: { error: { code: 'SANDBOX_GONE', reason: 'expired' } } });
    await until('what counts is what lives', async () => (await used()) === before.length);
    // What made it does not make it anew.
    expect((await ask('/v1/sandboxes', 'POST', { image: 'bb:1', requestId: 'ttl' })).body.error.code).toBe(
      'SANDBOX_GONE',
    );
  });

  it('sends elsewhere what finds no room, once its image is there, and has its changes as an image here', async () => {
    const cpus = async (count: number, more: object = {}) =>
      ask('/v1/sandboxes', 'POST', { image: 'bb:1', cpus: count, ...more });
    const nodeCpus = 8 * availableParallelism();
    // More than half of what the three have; no two fit on one.
    const large = await Promise.all(EDGES.map(() => cpus(nodeCpus * 0.55)));
    expect(large.map(({ body }) => body.edge).sort()).toEqual(EDGES);
    const refused = await cpus(1, { labels: ['cloud'] });
    expect(refused).toMatchObject({ status: 503, body: { error: { code: 'PLACEMENT_NO_ROOM' } } });
    expect(refused.body.error.message).toContain('its store has not all of the images');
    const images = join(folder, 'images');
    fs.writeFileSync(images, 'bb:1\n');
    await runCommand('sync', '--to', join(folder, 'cloud-store'), '--images', images);
    let there: Answer | undefined;
    await until('it is known', async () => {
      there = await cpus(1, { labels: ['cloud'] });
      return there.status === 201;
    });
    const { body } = await cpus(1);
    expect(body.edge).toBe(CLOUD);
    await append(body.id, 'elsewhere');
    await until('it has run', async () => (await lines(body.id)).includes('elsewhere'));
    const packed = await ask(`/v1/sandboxes/${body.id}/pack-diff`, 'POST', { name: 'packed:1' });
    expect(packed.body).toMatchObject({ name: 'root/packed:1' });
    expect(await runCommand('cat', 'root/packed:1', '/lines')).toMatchObject({ text: 'elsewhere\n' });
    for (const one of [...large, there!, { body }]) await ask(`/v1/sandboxes/${one.body.id}`, 'DELETE');
  });
});
