/**
 * Other limits for a sandbox that runs: what it counts as changes with them. What grows is counted before its edge is asked, what shrinks afterwards, so
 * the quota holds at every moment; where it is not known what the edge has done, the larger of both counts until its roster tells (reconcile.ts).
 *
 * Of one sandbox a change at a time, and each touches what it names alone, here and on the edge: another instance may change the rest meanwhile.
 */
import type { Static } from '@sinclair/typebox';
import type { FastifyRequest } from 'fastify';
import { DsecError, InTurn, isDsecError, messageOf } from '#base';
import { AMOUNTS_HEADER, amountsAfter, unsaidIn } from '../edge/sandbox-owner.ts';
import type { ResourceAmounts } from '../iam/iam.ts';
import { type Amounts, larger, RESOURCES } from '../placement/amounts.ts';
import { backendOf } from '../runtime-service/backend-view.ts';
import type { LimitsBody } from '../runtime-service/limit-schemas.ts';
import type { ApiParts } from './api-parts.ts';
import type { CreateDefaults } from './create-sandbox.ts';
import { gone } from './edges.ts';
import type { SandboxAddress } from './sandbox-id.ts';
import type { EdgeSandbox } from './sandbox-view.ts';

type Changes = Static<typeof LimitsBody>;
type Now = EdgeSandbox & { readonly amounts?: Amounts; readonly backend?: string };

interface Target {
  readonly id: string;
  readonly address: SandboxAddress;
  readonly reservation: string | undefined;
}

export class LimitChanges {
  private readonly parts: Pick<ApiParts, 'iam' | 'edges' | 'defaults' | 'note'>;
  private readonly turns = new InTurn<string>();

  constructor(parts: Pick<ApiParts, 'iam' | 'edges' | 'defaults' | 'note'>) {
    this.parts = parts;
  }

  /** @throws IAM_QUOTA, SANDBOX_GONE, EDGE_*, as the sandbox's `update` */
  change(request: FastifyRequest, target: Target, changes: Changes): Promise<object> {
    return this.turns.run(target.id, () => this.changeNow(request, target, changes));
  }

  private async changeNow(
    request: FastifyRequest,
    { id, address, reservation }: Target,
    changes: Changes,
  ): Promise<object> {
    const { iam, edges, defaults, note } = this.parts;
    const { name, edge } = address;
    const path = `/v1/sandboxes/${encodeURIComponent(name)}`;
    const operation = request.headers['x-dsec-operation'];
    const headers = {
      'x-request-id': request.id,
      ...(typeof operation === 'string' ? { 'x-dsec-operation': operation } : {}),
    };
    const put = (more: Readonly<Record<string, string>>) =>
      edges.ask<object>(edge, {
        method: 'PUT',
        path: `${path}/limits`,
        body: changes,
        headers: { ...headers, ...more },
        timeoutMs: 0,
      });
    // What is left wrong the roster corrects; it is no answer to whoever asked.
    const settle = (amounts: Partial<ResourceAmounts>) =>
      iam.resize(reservation!, amounts).catch((error: unknown) => note(`limits of ${id}: ${messageOf(error)}`));
    try {
      const told = await edges.ask<Now>(edge, { method: 'GET', path, headers });
      const now = told.amounts;
      if (now === undefined || reservation === undefined) return await put({});
      const next = changed(now, changes, unsaidIn(backendOf(told), defaults));
      const most = larger(now, next);
      if (!same(most, now)) await iam.resize(reservation, named(most, changes));
      let answer: object;
      try {
        answer = await put({ [AMOUNTS_HEADER]: JSON.stringify(next) });
      } catch (error) {
        // Nothing was changed, unless nobody knows.
        const isKnown = error instanceof DsecError && !isDsecError(error, 'EDGE_UNREACHABLE');
        if (isKnown && !same(most, now)) await settle(named(now, changes));
        throw error;
      }
      if (!same(most, next)) await settle(named(next, changes));
      return answer;
    } catch (error) {
      throw gone(id, error);
    }
  }
}

/** Null and 0: without a limit it counts as the defaults say. */
export function changed(now: Amounts, changes: Changes, defaults: CreateDefaults): Amounts {
  const { cpus, memoryBytes, diskBytes } = changes;
  return amountsAfter(now, changes, {
    cpuMilli: cpus ? Math.ceil(cpus * 1000) : defaults.cpuMilli,
    memoryBytes: memoryBytes || defaults.memoryBytes,
    diskBytes: diskBytes || defaults.diskBytes,
    gpus: now.gpus,
  });
}

/** As quotas count it. */
export function counted({ cpuMilli, memoryBytes, diskBytes }: Omit<Amounts, 'gpus'>) {
  return { sandboxes: 1, cpuMilli, memoryBytes, diskBytes };
}

/** Of what the change names. */
function named({ cpuMilli, memoryBytes, diskBytes }: Amounts, changes: Changes): Partial<ResourceAmounts> {
  return {
    ...(changes.cpus === undefined ? {} : { cpuMilli }),
    ...(changes.memoryBytes === undefined ? {} : { memoryBytes }),
    ...(changes.diskBytes === undefined ? {} : { diskBytes }),
  };
}

function same(a: Amounts, b: Amounts): boolean {
  return RESOURCES.every((resource) => a[resource] === b[resource]);
}
