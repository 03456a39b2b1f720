/**
 * New sandboxes on the same edge, with the files of one that is there. Each counts for the project as a new one does: all of them are reserved before the
 * edge is asked, and what does not come to be is released.
 */
import { type Static, Type } from '@sinclair/typebox';
import type { FastifyRequest } from 'fastify';
import { digestOf, isDsecError } from '#base';
import { unsaidIn } from '../edge/sandbox-owner.ts';
import { fail } from '../errors.ts';
import type { Reservation } from '../iam/iam.ts';
import { backendOf } from '../runtime-service/backend-view.ts';
import { ForkBody } from '../runtime-service/fork-sandbox.ts';
import { whose } from './access.ts';
import type { ApiParts } from './api-parts.ts';
import { gone } from './edges.ts';
import { allowHostShared, askerOf, type Isolation } from './host-shared.ts';
import { whileAsking } from './keep-asking.ts';
import type { SandboxAddress } from './sandbox-id.ts';
import { type EdgeSandbox, type SandboxView, viewOf } from './sandbox-view.ts';

const { reservations: _reservations, ...ofClients } = ForkBody.properties;
export const ForkRequest = Type.Object(ofClients, { additionalProperties: false });

interface Amounts {
  readonly cpuMilli: number;
  readonly memoryBytes: number;
  readonly diskBytes: number;
}

interface EdgeFork {
  readonly snapshot: { readonly name: string; readonly digest: string };
  readonly notes: readonly string[];
  readonly sandboxes: readonly EdgeSandbox[];
}

const AT_ONCE = 64;

export async function forkSandbox(
  { iam, access, edges, defaults, events, maker, note }: ApiParts,
  request: FastifyRequest,
  { id, address, project }: { readonly id: string; readonly address: SandboxAddress; readonly project: string },
  asked: Static<typeof ForkRequest>,
): Promise<Omit<EdgeFork, 'sandboxes'> & { readonly sandboxes: readonly SandboxView[] }> {
  const { name, edge } = address;
  const { count = 1, requestId } = asked;
  const path = `/v1/sandboxes/${encodeURIComponent(name)}`;
  const ask = async <T>(method: 'GET' | 'POST', tail: string, body?: object) => {
    const operation = request.headers['x-dsec-operation'];
    const headers = {
      'x-request-id': request.id,
      ...(typeof operation === 'string' ? { 'x-dsec-operation': operation } : {}),
    };
    try {
      return await edges.ask<T>(edge, { method, path: `${path}${tail}`, body, headers, timeoutMs: 0 });
    } catch (error) {
      throw gone(id, error);
    }
  };
  const parent = await ask<EdgeSandbox & Isolation & { amounts?: Amounts; backend?: string }>('GET', '');
  await allowHostShared(access, askerOf(request), parent, project);
  const { cpuMilli, memoryBytes, diskBytes } = parent.amounts ?? unsaidIn(backendOf(parent), defaults);
  const amounts = { sandboxes: 1, cpuMilli, memoryBytes, diskBytes };
  const user = request.identity.principal;
  // As long as it may be: cut short, two forks could be one.
  const fork = requestId === undefined ? undefined : digestOf(Buffer.from(`${id}\n${requestId}`));
  const reservations: Reservation[] = [];
  try {
    for (let from = 0; from < count; from += AT_ONCE) {
      const some = Array.from({ length: Math.min(AT_ONCE, count - from) }, (_, at) => {
        const key = fork === undefined ? undefined : `fork ${fork} ${from + at}`;
        return iam.reserve({ project, user, requestId: key, amounts, edge });
      });
      const settled = await Promise.allSettled(some);
      for (const one of settled) if (one.status === 'fulfilled') reservations.push(one.value);
      const refused = settled.find((one) => one.status === 'rejected');
      if (refused !== undefined) throw refused.reason;
    }
    const ended = reservations.find(({ state }) => state === 'ended');
    if (ended !== undefined) {
      const reason = 'it has ended; it was made by this fork';
      throw fail('SANDBOX_GONE', { id: `${ended.sandbox}.${ended.edge}`, reason });
    }
    const before = reservations.filter(({ state, existing }) => existing && state === 'pending');
    await Promise.all(before.map((one) => iam.asking(one.id, edge)));
  } catch (error) {
    await releaseNew(reservations);
    throw error;
  }
  let forked: EdgeFork;
  try {
    const pending = reservations.filter(({ state }) => state === 'pending').map((one) => one.id);
    const all = reservations.map((one) => one.id);
    const make = () => ask<EdgeFork>('POST', '/fork', { ...asked, reservations: all });
    forked = await whileAsking({ iam, note }, pending, edge, make);
  } catch (error) {
    // Whether it made them is its roster's to say.
    if (isDsecError(error, 'EDGE_UNREACHABLE')) throw fail('CREATE_UNSETTLED', { edge }, error);
    await releaseNew(reservations);
    throw error;
  }
  const views = forked.sandboxes.map((told) => viewOf(edge, told));
  const placed = await Promise.allSettled(
    views.map((view, at) => {
      const reservation = reservations[at];
      return reservation?.state === 'pending' ? iam.placed(reservation.id, edge, view.name) : undefined;
    }),
  );
  const failed = placed.find((one) => one.status === 'rejected');
  if (failed !== undefined) {
    // It counts for nobody; and without a request id nobody learns of the others.
    const uncounted = views.filter((_, at) => requestId === undefined || placed[at]?.status === 'rejected');
    await Promise.all(uncounted.map(({ name: child }) => maker.remove(edge, child)));
    if (requestId === undefined) await Promise.all(reservations.map((one) => iam.release(one.id)));
    throw failed.reason;
  }
  const entry = { ...whose(request.identity), action: 'sandbox.create', project, target: id, requestId: request.id };
  await access.audit({ ...entry, outcome: 'done', detail: { forks: count } });
  for (const view of views) events.created(view);
  return { ...forked, sandboxes: views };

  async function releaseNew(made: readonly Reservation[]): Promise<void> {
    await Promise.all(made.filter(({ existing }) => !existing).map((one) => iam.release(one.id)));
  }
}
