/** Whatever the API is asked for, by its own description and beside it, it never answers 500. */
import { afterAll, beforeAll, expect, it } from 'vitest';
import { ApiSite } from './api-site.ts';

const ODD: readonly unknown[] = [
  null,
  '',
  'x',
  '\u0000',
  '../..',
  -1,
  0,
  1e300,
  true,
  [],
  {},
  ['a'],
  { a: { b: 1 } },
  'root/a',
  'small:1',
];

let site: ApiSite;
beforeAll(async () => {
  site = await ApiSite.make(1);
});
afterAll(() => site?.remove());

/** The same numbers each time. */
function numbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

interface Schema {
  readonly properties?: Readonly<Record<string, Schema>>;
}
interface Operation {
  readonly parameters?: readonly { readonly in: string; readonly name: string }[];
  readonly requestBody?: { readonly content?: Readonly<Record<string, { readonly schema?: Schema }>> };
}

it('never answers 500', { timeout: 240_000 }, async () => {
  const random = numbers(7);
  const any = <T>(of: readonly T[]) => of[Math.floor(random() * of.length)]!;
  const { id } = (await site.create()).body;
  const paths = (await site.json('/openapi.json')).body.paths as Record<string, Record<string, Operation>>;
  const failed: string[] = [];
  for (const [path, item] of Object.entries(paths)) {
    if (path === '/v1/events') continue;
    for (const [method, operation] of Object.entries(item)) {
      for (let round = 0; round < 3; round++) {
        const filled = path.replace(/\{(\w+)\}/g, (_whole, name) =>
          name === 'id' && random() < 0.7 ? id : encodeURIComponent(String(any(ODD))) || 'x',
        );
        const query = (operation.parameters ?? [])
          .filter((one) => one.in === 'query' && random() < 0.7)
          .map(({ name }) => `${name}=${encodeURIComponent(String(any(ODD)))}`);
        const schema = operation.requestBody?.content?.['application/json']?.schema;
        const properties = Object.keys(schema?.properties ?? {});
        const body =
          schema === undefined || random() < 0.1
            ? any(ODD)
            : Object.fromEntries(properties.filter(() => random() < 0.6).map((name) => [name, any(ODD)]));
        const url = `${filled}${query.length === 0 ? '' : `?${query.join('&')}`}`;
        const text = random() < 0.1 ? '{"broken' : JSON.stringify(body);
        const answer = await site.ask(url, {
          method: method.toUpperCase(),
          body: method === 'get' ? undefined : text,
          headers: method === 'get' ? {} : { 'content-type': 'application/json' },
        });
        await answer.arrayBuffer();
        if (answer.status === 500) failed.push(`${method} ${url} ${text}`);
      }
    }
  }
  for (const path of [
    '/',
    '/v1',
    '/v1/sandboxes/%zz',
    '/v1/sandboxes/%00.e1',
    '/v1/images/%2e%2e%2f',
    `/v1/sandboxes/${'a'.repeat(3000)}.e1`,
  ]) {
    if ((await site.json(path)).status === 500) failed.push(path);
  }
  expect(failed).toEqual([]);
});
