/**
 * Nodes elsewhere that take what the others have no room for: only what `dsec sync` has brought to their store, from its record on, and only when the others
 * are full. What is said to be there and is not costs a refusal, never a sandbox.
 */
import { afterAll, beforeAll, beforeEach, expect, it } from 'vitest';
import { openImage, openStore, syncImages } from '#imagesvc';
import { overflowNodes } from '../apiserver/overflow.ts';
import { ApiSite, type FakeEdge } from './api-site.ts';
import { until } from './edge-site.ts';

const TARGET = 'file:///tmp/dsec-no-such-folder-of-overflow';
let site: ApiSite;
let near: FakeEdge;
let far: FakeEdge;

beforeAll(async () => {
  site = await ApiSite.make(2, { overflow: await overflowNodes(`cloud=${TARGET}`), pollMs: 50 });
  [near, far] = site.edges as [FakeEdge, FakeEdge];
  far.labels = ['cloud'];
});
beforeEach(async () => {
  for (const edge of site.edges) {
    edge.mode = 'ok';
    edge.sandboxes.clear();
    edge.heard.length = 0;
  }
  near.limit = 10;
  await site.api.parts.edges.poll();
  for (const { edge } of site.edges) await site.api.parts.reconciler.edge(edge);
});
afterAll(() => site?.remove());

const bodies = (edge: FakeEdge) =>
  edge.heard
    .filter(({ method, url }) => method === 'POST' && url === '/v1/sandboxes')
    .map(({ body }) => JSON.parse(body));
/** Eight of ten is not above 80 %; nine is. */
const fill = async (count: number) => {
  for (let made = 0; made < count; made++) expect((await site.create()).body.edge).toBe('e1');
};
/** As `dsec sync --to` does it, to a store that nobody here needs. */
const sync = async () => {
  const from = await openStore(`file://${site.folder}/store`);
  const to = await openStore(`file://${site.folder}/target`);
  await syncImages(from, Object.assign(to, { url: TARGET }), ['small:1']);
};

it('goes nowhere else before it was synced, and says so when there is room nowhere else', async () => {
  await fill(10);
  const refused = await site.create();
  expect(refused.status).toBe(503);
  expect(refused.body.error.message).toContain('cloud, and its store has not all of the images');
  expect((await site.create({ labels: ['cloud'] })).body.error.code).toBe('PLACEMENT_NO_ROOM');
  expect(far.sandboxes.size).toBe(0);
});

it('goes there above 80 % once it was, by digest, from their store; and near again when there is room', async () => {
  await sync();
  // What an image has is believed for some seconds.
  await until('the record is seen', async () => (await site.create({ labels: ['cloud'] })).status === 201);
  far.sandboxes.clear();
  far.heard.length = 0;
  await fill(9);
  expect(far.heard).toEqual([]);
  const { body } = await site.create();
  expect(body.edge).toBe('e2');
  const { manifestDigest } = await openImage(await openStore(`file://${site.folder}/store`), 'small:1');
  expect(bodies(far)).toEqual([expect.objectContaining({ store: TARGET, image: manifestDigest })]);
  expect(bodies(near).every(({ store, image }) => store.endsWith('/store') && image === 'small:1')).toBe(true);
  const two = await site.create({ workspace: 'small:1', toolkits: ['small:1'] });
  expect(two.body.edge).toBe('e2');
  expect(bodies(far)[1]).toMatchObject({
    image: manifestDigest,
    workspace: manifestDigest,
    toolkits: [manifestDigest],
  });
  // Its changes become an image of the cluster's own store.
  await site.json(`/v1/sandboxes/${body.id}/pack-diff`, { method: 'POST', body: { name: 'packed:1' } });
  const packed = far.heard.find(({ url }) => url.endsWith('/pack-diff'))!;
  expect(JSON.parse(packed.body)).toMatchObject({ name: 'root/packed:1', store: `file://${site.folder}/store` });
  near.sandboxes.clear();
  await site.api.parts.edges.poll();
  expect((await site.create()).body.edge).toBe('e1');
});

it('comes back when that store lacks it after all, and asks there again later only', async () => {
  await fill(9);
  far.mode = 'lack';
  const asked = far.creates;
  expect((await site.create()).body.edge).toBe('e1');
  expect(far.creates).toBe(asked + 1);
  expect((await site.create()).status).toBe(503);
  expect(far.creates).toBe(asked + 1);
  expect(await site.used()).toBe(10);
});

it('is told by text that is looked at', async () => {
  for (const [text, above] of [
    ['cloud'],
    ['=x'],
    ['a b=c'],
    ['cloud=file:///x', '1'],
    ['cloud=file:///x', '-1'],
    ['cloud=file:///x', 'x'],
  ]) {
    await expect(overflowNodes(text!, above)).rejects.toMatchObject({ code: 'API_OVERFLOW', exit: 2 });
  }
  expect(await overflowNodes('cloud=/srv/x')).toEqual({ label: 'cloud', above: 0.8, storeUrl: 'file:///srv/x' });
});
