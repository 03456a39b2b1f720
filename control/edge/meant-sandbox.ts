/**
 * A request may say which very sandbox it is about, beside its name: whoever asks has looked at that one's owner, and another one may have the name by
 * now.
 */
import type { FastifyInstance } from 'fastify';
import { ONE_SANDBOX } from '../runtime-service/route.ts';
import { failAsRuntime } from './runtime-failure.ts';

/** The `id` of its view. */
export const SANDBOX_HEADER = 'x-dsec-sandbox';

/** Of the sandbox that has the name now. */
export type IdOf = (name: string) => string | undefined;

/** Before the routes. */
export function refuseOthers(app: FastifyInstance, idOf: IdOf): void {
  app.addHook('onRequest', async (request) => {
    if (!request.routeOptions.url?.startsWith(ONE_SANDBOX)) return;
    const { name = '' } = request.params as { name?: string };
    refuseOther(idOf, name, request.headers[SANDBOX_HEADER]);
  });
}

/** @throws RUNTIME_SANDBOX_GONE */
export function refuseOther(idOf: IdOf, name: string, meant: string | string[] | undefined): void {
  if (meant === undefined) return;
  const id = idOf(name);
  if (id === undefined || id === meant) return;
  throw failAsRuntime('RUNTIME_SANDBOX_GONE', { name, reason: 'another sandbox has its name now' });
}
