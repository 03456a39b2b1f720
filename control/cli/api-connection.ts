/** JSON from and to the API of the cluster that is in force (contexts.ts): for commands that mean nothing on one machine alone. */
import type { IncomingMessage } from 'node:http';
import { fail } from '../errors.ts';
import { thrownThere } from '../runtime-service/sandbox-client.ts';
import { connectionProblem, requestTo } from '../runtime-service/service-address.ts';
import type { Context } from './context.ts';
import { endpointOf } from './sandbox-client-of.ts';

type Query = Readonly<Record<string, string | number | boolean | undefined>>;

export interface ApiConnection {
  /** @throws what the API answers with, as the error it was there; SERVICE_UNREACHABLE, SERVICE_LOST */
  json<T>(method: string, path: string, asked?: { readonly query?: Query; readonly body?: object }): Promise<T>;
}

/** @throws CONTEXT_* ; CONTEXT_NEEDED where this machine is meant */
export function apiConnection(context: Context, program: string): ApiConnection {
  const endpoint = endpointOf(context);
  if (endpoint === undefined) throw fail('CONTEXT_NEEDED', { program });
  return {
    async json<T>(
      method: string,
      path: string,
      { query = {}, body }: { query?: Query; body?: object } = {},
    ): Promise<T> {
      const named = Object.entries(query).filter((entry) => entry[1] !== undefined);
      const search = new URLSearchParams(
        named.map(([name, value]): [string, string] => [name, String(value)]),
      ).toString();
      const answer = await new Promise<IncomingMessage>((resolve, reject) => {
        const headers = body === undefined ? {} : { 'content-type': 'application/json' };
        const sent = requestTo(endpoint, {
          method,
          path: search === '' ? path : `${path}?${search}`,
          headers,
          signal: context.signal,
        });
        sent.once('response', resolve);
        sent.once('error', reject);
        sent.end(body === undefined ? undefined : JSON.stringify(body));
      }).catch((error) => {
        throw connectionProblem(endpoint, error);
      });
      let text = '';
      try {
        for await (const chunk of answer.setEncoding('utf8')) text += chunk;
      } catch (error) {
        throw connectionProblem(endpoint, error);
      }
      if ((answer.statusCode ?? 500) >= 300) throw thrownThere(text);
      return (text === '' ? undefined : JSON.parse(text)) as T;
    },
  };
}
