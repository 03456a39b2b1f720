/**
 * IAM over HTTP: `iamRoutes(app, iam)` adds its routes to the apiserver's application. Paths of projects travel in queries and bodies, where
 * their slashes need no care. What is thrown is for the application's error handler.
 */
import type { Static, TSchema } from '@sinclair/typebox';
import { Type } from '@sinclair/typebox';
import type { FastifyInstance, FastifyRequest } from 'fastify';
import { fail } from '../errors.ts';
import type { Iam, Identity, Resource } from './iam.ts';
import * as schemas from './schemas.ts';

export interface IamRouteOptions {
  /** Who calls; by default by the request's `Authorization: Bearer TOKEN`. */
  readonly identityOf?: (request: FastifyRequest) => Promise<Identity>;
}

interface Schema<B extends TSchema, Q extends TSchema, P extends TSchema> {
  readonly summary: string;
  readonly body?: B;
  readonly query?: Q;
  readonly params?: P;
  readonly answer: TSchema;
  /** 200 when not said. */
  readonly status?: number;
}

interface Call<B extends TSchema, Q extends TSchema, P extends TSchema> {
  readonly by: Identity;
  readonly body: Static<B>;
  readonly query: Static<Q>;
  readonly params: Static<P>;
}

/** @throws IAM_TOKEN_INVALID */
export function bearerOf(request: FastifyRequest): string {
  const match = /^Bearer +(\S+)$/i.exec(request.headers.authorization ?? '');
  if (match === null) throw fail('IAM_TOKEN_INVALID');
  return match[1] as string;
}

export function iamRoutes(app: FastifyInstance, iam: Iam, options: IamRouteOptions = {}): void {
  const identityOf = options.identityOf ?? ((request: FastifyRequest) => iam.authenticate(bearerOf(request)));

  function route<B extends TSchema, Q extends TSchema, P extends TSchema>(
    method: 'GET' | 'POST' | 'PUT' | 'PATCH' | 'DELETE',
    url: string,
    tag: string,
    { summary, body, query, params, answer, status = 200 }: Schema<B, Q, P>,
    handler: (call: Call<B, Q, P>) => Promise<unknown>,
  ): void {
    app.route({
      method,
      url,
      schema: given({ summary, tags: [tag], body, querystring: query, params, response: { [status]: answer } }),
      // Before the body is looked at: a stranger learns nothing about what is taken.
      onRequest: async (request) => {
        callers.set(request, await identityOf(request));
      },
      handler: async (request, reply) => {
        const by = callers.get(request) as Identity;
        const call = { by, body: request.body, query: request.query, params: request.params } as Call<B, Q, P>;
        const result = await handler(call);
        reply.status(status);
        return result;
      },
    });
  }
  const callers = new WeakMap<FastifyRequest, Identity>();
  const listed = <T extends TSchema>(name: string, item: T) => Type.Object({ [name]: Type.Array(item) });

  route(
    'GET',
    '/v1/whoami',
    'tokens',
    { summary: 'who the token belongs to and what it may do', answer: schemas.WhoAmI },
    async ({ by }) => {
      const { identity, policies } = await iam.whoAmI(by);
      return { ...identity, actions: [...identity.actions], policies };
    },
  );

  route(
    'GET',
    '/v1/projects',
    'projects',
    {
      summary: 'projects at and below one that the caller may read',
      query: schemas.BelowQuery,
      answer: listed('projects', schemas.Project),
    },
    async ({ by, query }) => ({ projects: await iam.listProjects(by, query.project) }),
  );
  route(
    'POST',
    '/v1/projects',
    'projects',
    { summary: 'make a project', body: schemas.ProjectBody, answer: schemas.Project, status: 201 },
    ({ by, body }) => iam.createProject(by, body.path),
  );
  route(
    'DELETE',
    '/v1/projects',
    'projects',
    { summary: 'remove an empty project', query: schemas.PathQuery, answer: Type.Null(), status: 204 },
    ({ by, query }) => iam.removeProject(by, query.path),
  );

  route(
    'GET',
    '/v1/principals',
    'principals',
    {
      summary: 'users, services and agents of a project and below',
      query: schemas.BelowQuery,
      answer: listed('principals', schemas.Principal),
    },
    async ({ by, query }) => ({ principals: await iam.listPrincipals(by, query.project) }),
  );
  route(
    'POST',
    '/v1/principals',
    'principals',
    { summary: 'make a principal', body: schemas.PrincipalBody, answer: schemas.Principal, status: 201 },
    ({ by, body: { name, kind, project = by.project } }) =>
      iam.createPrincipal(by, { name, kind: kind as Identity['kind'], project }),
  );
  route(
    'PATCH',
    '/v1/principals/:name',
    'principals',
    {
      summary: 'disable a principal, so that all its tokens are refused, or enable it again',
      params: schemas.NameParams,
      body: schemas.DisabledBody,
      answer: schemas.Principal,
    },
    ({ by, params, body }) => iam.disablePrincipal(by, params.name, body.disabled),
  );

  route(
    'GET',
    '/v1/policies',
    'policies',
    {
      summary: "the caller's policies, and those of projects where he has policy.admin",
      query: schemas.PolicyQuery,
      answer: listed('policies', schemas.Policy),
    },
    async ({ by, query }) => ({ policies: await iam.listPolicies(by, query) }),
  );
  route(
    'POST',
    '/v1/policies',
    'policies',
    {
      summary: 'let a principal do something on a project and below',
      body: schemas.PolicyBody,
      answer: schemas.Policy,
      status: 201,
    },
    ({ by, body }) => iam.createPolicy(by, body),
  );
  route(
    'DELETE',
    '/v1/policies/:id',
    'policies',
    { summary: 'take a policy away, at once', params: schemas.IdParams, answer: Type.Null(), status: 204 },
    ({ by, params }) => iam.removePolicy(by, params.id),
  );

  route(
    'GET',
    '/v1/tokens',
    'tokens',
    {
      summary: "the caller's tokens, and those of projects where he has token.admin; never the tokens themselves",
      query: schemas.TokenQuery,
      answer: listed('tokens', schemas.Token),
    },
    async ({ by, query }) => ({ tokens: await iam.listTokens(by, query) }),
  );
  route(
    'POST',
    '/v1/tokens',
    'tokens',
    {
      summary: 'make a token; the answer holds it, and nothing else ever will',
      body: schemas.TokenBody,
      answer: schemas.MadeToken,
      status: 201,
    },
    ({ by, body }) => iam.createToken(by, body),
  );
  route(
    'DELETE',
    '/v1/tokens/:id',
    'tokens',
    { summary: 'revoke a token, at once', params: schemas.IdParams, answer: schemas.Token },
    ({ by, params }) => iam.revokeToken(by, params.id),
  );

  route(
    'GET',
    '/v1/quotas',
    'quotas',
    {
      summary: 'limits, what they set aside, and what is used, of projects at and below one',
      query: schemas.BelowQuery,
      answer: listed('quotas', schemas.Quota),
    },
    async ({ by, query }) => ({ quotas: await iam.listQuotas(by, query.project) }),
  );
  route(
    'PUT',
    '/v1/quotas',
    'quotas',
    { summary: 'set or take away limits of a project', body: schemas.QuotaBody, answer: schemas.Quota },
    ({ by, body }) => iam.setQuota(by, body.project, body.limits as Partial<Record<Resource, number | null>>),
  );

  route(
    'GET',
    '/v1/audit',
    'audit',
    {
      summary: 'who did what, newest first',
      query: schemas.AuditQuery,
      answer: listed('records', schemas.AuditRecord),
    },
    async ({ by, query: { project = by.project, ...query } }) => ({
      records: await iam.readAudit(by, { ...query, project }),
    }),
  );
}

/** Fastify warns of parts of a schema that are there and undefined. */
function given<T extends object>(schema: T): Partial<T> {
  return Object.fromEntries(Object.entries(schema).filter(([, part]) => part !== undefined)) as Partial<T>;
}
