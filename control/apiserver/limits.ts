/**
 * Other limits for a sandbox that runs: what it counts as changes with them. What grows is counted before its edge is asked, what shrinks afterwards, so
 * the quota holds at every moment; where it is not known what the edge has done, the larger of both counts until its roster tells (reconcile.ts).
 */
import type { Static } from '@sinclair/typebox';
import type { FastifyRequest } from 'fastify';
import { isDsecError } from '#base';
import { AMOUNTS_HEADER } from '../edge/sandbox-owner.ts';
import { type Amounts, RESOURCES } from '../placement/amounts.ts';
import type { LimitsBody } from '../runtime-service/limit-schemas.ts';
import type { ApiParts } from './api-parts.ts';
import type { CreateDefaults } from './create-sandbox.ts';
import { gone } from './edges.ts';
import type { SandboxAddress } from './sandbox-id.ts';
import type { EdgeSandbox } from './sandbox-view.ts';

type Changes = Static<typeof LimitsBody>;

export async function changeLimits(
  { iam, edges, defaults }: ApiParts,
  request: FastifyRequest,
  { id, address, reservation }: { id: string; address: SandboxAddress; reservation: string | undefined },
  changes: Changes,
): Promise<object> {
  const { name, edge } = address;
  const path = `/v1/sandboxes/${encodeURIComponent(name)}`;
  const operation = request.headers['x-dsec-operation'];
  const headers = {
    'x-request-id': request.id,
    ...(typeof operation === 'string' ? { 'x-dsec-operation': operation } : {}),
  };
  try {
    const now = (await edges.ask<EdgeSandbox & { amounts?: Amounts }>(edge, { method: 'GET', path, headers })).amounts;
    if (now === undefined || reservation === undefined) return await put({});
    const next = changed(now, changes, defaults);
    const most = atMost(now, next);
    if (!same(most, now)) await iam.resize(reservation, counted(most));
    let answer: object;
    try {
      answer = await put({ [AMOUNTS_HEADER]: JSON.stringify(next) });
    } catch (error) {
      // Nothing was changed, unless nobody knows.
      if (!isDsecError(error, 'EDGE_UNREACHABLE') && !same(most, now)) await iam.resize(reservation, counted(now));
      throw error;
    }
    if (!same(most, next)) await iam.resize(reservation, counted(next));
    return answer;
  } catch (error) {
    throw gone(id, error);
  }

  function put(more: Readonly<Record<string, string>>): Promise<object> {
    const all = { ...headers, ...more };
    return edges.ask<object>(edge, {
      method: 'PUT',
      path: `${path}/limits`,
      body: changes,
      headers: all,
      timeoutMs: 0,
    });
  }
}

/** Null and 0: without a limit it counts as the defaults say. */
export function changed(now: Amounts, { cpus, memoryBytes, diskBytes }: Changes, defaults: CreateDefaults): Amounts {
  return {
    cpuMilli: cpus === undefined ? now.cpuMilli : cpus ? Math.ceil(cpus * 1000) : defaults.cpuMilli,
    memoryBytes: memoryBytes === undefined ? now.memoryBytes : memoryBytes || defaults.memoryBytes,
    diskBytes: diskBytes === undefined ? now.diskBytes : diskBytes || defaults.diskBytes,
    gpus: now.gpus,
  };
}

/** As quotas count it. */
export function counted({ cpuMilli, memoryBytes, diskBytes }: Omit<Amounts, 'gpus'>) {
  return { sandboxes: 1, cpuMilli, memoryBytes, diskBytes };
}

function atMost(a: Amounts, b: Amounts): Amounts {
  return Object.fromEntries(RESOURCES.map((resource) => [resource, Math.max(a[resource], b[resource])])) as Amounts;
}

function same(a: Amounts, b: Amounts): boolean {
  return RESOURCES.every((resource) => a[resource] === b[resource]);
}
