/** Networks of sandboxes over HTTP: what one may reach, what it has reached, what it was denied. Policies are checked where they are set. */
import { Type } from '@sinclair/typebox';
import { type CreateOptions, NETWORK_MODES, parsePolicy } from '#runtime';
import { fail } from '../errors.ts';
import { type AddRoute, ONE_SANDBOX } from './route.ts';

/** Its form is the runtime's to check. */
const Policy = Type.Record(Type.String(), Type.Unknown());

/** Of a sandbox that is to be made. */
export const NetworkBody = Type.Object(
  {
    mode: Type.Union(NETWORK_MODES.map((mode) => Type.Literal(mode))),
    policy: Type.Optional(Policy),
  },
  { additionalProperties: false },
);

const PolicyBody = Type.Object({ policy: Policy }, { additionalProperties: false });
const DeniedQuery = Type.Object({ limit: Type.Optional(Type.Integer({ minimum: 1, maximum: 10_000 })) });

export function networkRoutes(route: AddRoute): void {
  const network = `${ONE_SANDBOX}/network`;
  route('GET', network, {}, ({ sandbox }) => sandbox().network.view());
  route('PUT', network, { body: PolicyBody }, ({ sandbox, body }) => {
    return sandbox().network.setPolicy(parsePolicy(body.policy));
  });
  route('GET', `${network}/counters`, {}, ({ sandbox }) => sandbox().network.counters());
  route('GET', `${network}/denied`, { querystring: DeniedQuery }, ({ sandbox, query }) => {
    return sandbox().network.denied(query.limit);
  });
}

interface NetworkAsked {
  readonly mode: (typeof NETWORK_MODES)[number];
  readonly policy?: Readonly<Record<string, unknown>>;
}

/** @throws SANDBOX_BAD_REQUEST, RUNTIME_NETWORK_POLICY */
export function networkAsked(asked: NetworkAsked | undefined): CreateOptions['network'] {
  if (asked === undefined) return undefined;
  const { mode, policy } = asked;
  if (policy === undefined) return { mode };
  if (mode !== 'policy') throw fail('SANDBOX_BAD_REQUEST', { problem: `network "${mode}" has no policy` });
  return { mode, policy: parsePolicy(policy) };
}
