/** Whose sandboxes a command means: those of the API that is in force (contexts.ts), else those of this machine's runtime service. */

import type { Duplex } from 'node:stream';
import type { Command } from 'commander';
import { fail } from '../errors.ts';
import { openPort } from '../runtime-service/port-client.ts';
import { SandboxClient } from '../runtime-service/sandbox-client.ts';
import { type Context, NotServed } from './context.ts';
import { type Endpoint, findEndpoint } from './contexts.ts';

const chosen = new WeakMap<Context, { readonly api: string | undefined }>();

/** Gives `command`, or all commands below it, the option --api. */
export function withApi(command: Command, context: Context): Command {
  for (const one of command.commands.length === 0 ? [command] : command.commands) {
    one.option(
      '--api <url>',
      'the API of a cluster, a context, or `local`: this machine (default: $DSEC_API, else the current context)',
    );
    one.hook('preAction', (_command, called) => {
      chosen.set(context, { api: called.opts<{ api?: string }>().api });
    });
  }
  return command;
}

/** Undefined: this machine. @throws CONTEXT_*, NotServed where a service runs the command: an API is asked by the client's own process */
export function endpointOf(context: Context): Endpoint | undefined {
  const endpoint = findEndpoint(chosen.get(context)?.api, context.caller?.env ?? process.env);
  if (endpoint !== undefined && context.caller !== undefined) throw new NotServed();
  return endpoint;
}

/** For what there is only in a cluster. @throws CONTEXT_NEEDED, and as `endpointOf` */
export function clusterEndpoint(context: Context, program: string): Endpoint {
  const endpoint = endpointOf(context);
  if (endpoint === undefined) throw fail('CONTEXT_NEEDED', { program });
  return endpoint;
}

/** @throws as `endpointOf` */
export function sandboxClient(context: Context): SandboxClient {
  const endpoint = endpointOf(context);
  return endpoint === undefined ? new SandboxClient() : new SandboxClient(endpoint);
}

export function openSandboxPort(context: Context, sandbox: string, port: number): Promise<Duplex> {
  return openPort(sandbox, port, endpointOf(context));
}
