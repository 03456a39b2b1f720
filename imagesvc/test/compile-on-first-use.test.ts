/** Schemas that are compiled late check and write as those that were compiled at the start. */
import { Type } from '@sinclair/typebox';
import { fastify, type InjectOptions } from 'fastify';
import { expect, it } from 'vitest';
import { compileOnFirstUse } from '../server/compile-on-first-use.ts';

const Body = Type.Object(
  { name: Type.String({ minLength: 2 }), count: Type.Optional(Type.Integer({ minimum: 1 })) },
  { additionalProperties: false },
);
const Answer = Type.Object({ name: Type.String(), size: Type.Integer() });

function app(late: boolean) {
  const made = fastify({
    ...(late ? { schemaController: compileOnFirstUse() } : {}),
    ajv: { customOptions: { removeAdditional: false, coerceTypes: true, allErrors: false } },
  });
  const schema = {
    body: Body,
    querystring: Type.Object({ force: Type.Optional(Type.Boolean()) }),
    headers: Type.Object({ 'x-limit': Type.Optional(Type.Integer()) }),
    params: Type.Object({ id: Type.Integer() }),
    response: { 200: Answer },
  };
  made.post('/things/:id', { schema }, (request) => {
    const { force } = request.query as { force?: boolean };
    const { id } = request.params as { id: number };
    return { name: `${typeof force} ${typeof request.headers['x-limit']}`, size: id, secret: 'not in the schema' };
  });
  return made;
}

it.each([
  [
    'what is right, each in its type',
    { url: '/things/3?force=true', payload: { name: 'ab', count: '4' }, headers: { 'x-limit': '5' } },
  ],
  ['a path', { url: '/things/x', payload: { name: 'ab' } }],
  ['a query', { url: '/things/3?force=maybe', payload: { name: 'ab' } }],
  ['a header', { url: '/things/3', payload: { name: 'ab' }, headers: { 'x-limit': 'many' } }],
  ['a field too many', { url: '/things/3', payload: { name: 'ab', more: 1 } }],
  ['a field missing', { url: '/things/3', payload: {} }],
  ['no body', { url: '/things/3' }],
] as const)('answers as ever: %s', async (_what, request) => {
  const [late, early] = [app(true), app(false)];
  // Twice: as it is compiled, and as it is then.
  for (let i = 0; i < 2; i++) {
    const [one, other] = await Promise.all(
      [late, early].map((each) => each.inject({ method: 'POST', ...request } as InjectOptions)),
    );
    expect([one!.statusCode, one!.json()]).toEqual([other!.statusCode, other!.json()]);
  }
  await Promise.all([late.close(), early.close()]);
});

it('takes names of headers in small letters alone', async () => {
  const late = app(true);
  late.get('/capitals', { schema: { headers: Type.Object({ 'X-Count': Type.Integer() }) } }, () => 'never');
  await expect(late.ready()).rejects.toThrow('/capitals: the schema has the header X-Count');
});

it('compiles nothing that is not asked for', async () => {
  const late = app(true);
  late.get('/broken', { schema: { querystring: { type: 'nonsense' } } }, () => 'never');
  await late.ready();
  const payload = { name: 'ab' };
  expect((await late.inject({ method: 'POST', url: '/things/3', payload })).json()).toEqual({
    name: 'undefined undefined',
    size: 3,
  });
  expect((await late.inject('/broken')).statusCode).toBe(500);
  await late.close();
});
