/**
 * `dsec serve fncall`: tasks alone, over HTTP, for programs that want a URL and no cluster. On loopback without a token, as what it runs is isolated:
 * there anybody of this machine may call, and so can run tasks in the pools that are there and in images of its store, and change nothing. Elsewhere
 * callers need a token. A unix socket is for who may open it.
 */
import type { FastifyInstance } from 'fastify';
import { fail } from '../errors.ts';
import { createService, type ServiceOptions } from '../service-base/service-app.ts';
import { FnCallHost } from './fncall-host.ts';
import { fncallMetrics, fncallRoutes } from './fncall-routes.ts';
import type { PoolAsked } from './task-schemas.ts';

export interface ServeFnCallOptions extends Pick<ServiceOptions, 'listen' | 'tls' | 'token' | 'logLevel' | 'logger'> {
  readonly storeUrl: string;
  /** Made before it listens. */
  readonly pools: Readonly<Record<string, PoolAsked>>;
}

export interface ServingFnCall {
  readonly url: string;
  readonly host: FnCallHost;
  reload(): void;
  close(drainMs: number): Promise<void>;
}

const LOOPBACK = /^(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:\d+)?$/;

/** A page in a browser of this machine that calls a name of its own which leads here. */
async function fromHere({ headers: { host = '' } }: { readonly headers: { readonly host?: string } }): Promise<void> {
  if (LOOPBACK.test(host)) return;
  throw fail('SANDBOX_BAD_REQUEST', {
    problem: `Host ${JSON.stringify(host)}: without a token only localhost is served`,
  });
}

/** @throws SERVICE_*, SERVER_LISTEN, RUNTIME_FNCALL_*, STORE_* */
export async function serveFnCall(options: ServeFnCallOptions): Promise<ServingFnCall> {
  const open = options.token === undefined && LOOPBACK.test(options.listen);
  const service = createService({ name: 'fncall', ...options, ...(open ? { authenticate: fromHere } : {}) });
  const host = new FnCallHost({
    storeUrl: options.storeUrl,
    note: (text) => service.logger.warn(text),
    remember: false,
  });
  const close = async (drainMs: number) => {
    await service.close(drainMs);
    await host.close();
  };
  try {
    for (const [name, asked] of Object.entries(options.pools)) await host.define(name, asked);
    fncallRoutes(service.app as unknown as FastifyInstance, host, { open });
    fncallMetrics(service.metrics, host);
    const url = await service.listen();
    return { url, host, reload: () => service.reload(), close };
  } catch (error) {
    await close(0);
    throw error;
  }
}
