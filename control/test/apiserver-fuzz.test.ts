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
  readonly type?: string;
  readonly items?: Schema;
  readonly anyOf?: readonly Schema[];
  readonly enum?: readonly unknown[];
  readonly const?: unknown;
  readonly minimum?: number;
  readonly maximum?: number;
  readonly required?: readonly string[];
}
interface Operation {
  readonly parameters?: readonly { readonly in: string; readonly name: string }[];
  readonly requestBody?: { readonly content?: Readonly<Record<string, { readonly schema?: Schema }>> };
}

const WORDS = [
  'small:1',
  'x',
  'e1',
  'root',
  'a-b',
  'h100',
  `${'é'.repeat(20)}`,
  'a'.repeat(300),
  '/tmp/../..',
  '10.0.0.0/8',
];

/** One that the schema takes, mostly: near its bounds too. */
function madeBy(schema: Schema, random: () => number, depth = 0): unknown {
  const any = <T>(of: readonly T[]) => of[Math.floor(random() * of.length)]!;
  if (schema.const !== undefined) return schema.const;
  if (schema.enum !== undefined) return any(schema.enum);
  if (schema.anyOf !== undefined) return madeBy(any(schema.anyOf), random, depth);
  const { minimum = 0, maximum = 2 ** 53 - 1 } = schema;
  switch (schema.type) {
    case 'integer':
    case 'number':
      if (random() < 0.2) return any([minimum - 1, maximum + 1, minimum + 0.5]);
      return any([minimum, Math.min(maximum, minimum + 1), Math.min(maximum, minimum + 7), maximum]);
    case 'boolean':
      return random() < 0.5;
    case 'array':
      return Array.from({ length: Math.floor(random() * 3) }, () => madeBy(schema.items ?? {}, random, depth + 1));
    case 'object': {
      if (depth > 4) return {};
      const { required = [] } = schema;
      const names = Object.entries(schema.properties ?? {}).filter(
        ([name]) => required.includes(name) || random() < 0.3,
      );
      return Object.fromEntries(names.map(([name, one]) => [name, madeBy(one, random, depth + 1)]));
    }
    default:
      return any(WORDS);
  }
}

it('never answers 500 to what it describes, one field of it odd or none', { timeout: 240_000 }, async () => {
  const random = numbers(11);
  const any = <T>(of: readonly T[]) => of[Math.floor(random() * of.length)]!;
  const [edge] = site.edges;
  edge!.gpus = 2;
  edge!.labels = ['gpu:h100', 'x'];
  await site.api.parts.edges.poll();
  const paths = (await site.json('/openapi.json')).body.paths as Record<string, Record<string, Operation>>;
  const schemaOf = (path: string) => paths[path]!.post!.requestBody!.content!['application/json']!.schema!;
  const failed: string[] = [];
  const seen = new Map<number, number>();
  const lacks = new Set(Object.keys(schemaOf('/v1/sandboxes').properties ?? {}));
  for (let round = 0; round < 400; round++) {
    const schema = schemaOf('/v1/sandboxes');
    const all = madeBy({ ...schema, type: 'object' }, random) as Record<string, unknown>;
    // Every other time one field alone: what it does is not hidden by another one.
    const [name, one] = any(Object.entries(schema.properties ?? {}));
    const body = round % 2 === 0 ? all : { [name]: madeBy(one, random) };
    body.image = 'small:1';
    if (round % 4 === 0) body[any(Object.keys(schema.properties ?? {}))] = any(ODD);
    for (const name of Object.keys(body)) lacks.delete(name);
    const asked = round % 8 === 0 ? { requests: [body, body] } : body;
    const path = round % 8 === 0 ? '/v1/sandboxes/batch' : '/v1/sandboxes';
    const answer = await site.ask(path, {
      method: 'POST',
      body: JSON.stringify(asked),
      headers: { 'content-type': 'application/json' },
    });
    const text = await answer.text();
    seen.set(answer.status, (seen.get(answer.status) ?? 0) + 1);
    if (answer.status === 500 || /"(INTERNAL|BUG)"/.test(text)) failed.push(`${path} ${JSON.stringify(asked)} ${text}`);
  }
  expect(failed).toEqual([]);
  // Every field was sent; some of it was taken, some refused.
  expect([...lacks]).toEqual([]);
  expect(seen.get(201) ?? 0).toBeGreaterThan(10);
  expect(seen.get(400) ?? 0).toBeGreaterThan(10);
  // What was refused counts for nothing.
  await site.api.parts.reconciler.edge('e1');
  expect(await site.used()).toBe(site.sandboxes);
});

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
    const answer = await site.ask(path);
    await answer.arrayBuffer();
    if (answer.status === 500) failed.push(path);
  }
  expect(failed).toEqual([]);
});
