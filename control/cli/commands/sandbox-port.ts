/** `dsec sandbox port`: a port of this machine that leads to one inside a sandbox. */
import { once } from 'node:events';
import { createServer, type Server } from 'node:net';
import type { Command } from 'commander';
import { isDsecError, messageOf } from '#base';
import { fail } from '../../errors.ts';
import { join } from '../../runtime-service/port-streams.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { openSandboxPort, sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface PortCommand extends JsonOption {
  readonly address: string;
}

interface Forward {
  /** 0: any that is free. */
  readonly local: number;
  readonly inside: number;
}

/** There will be no connection any more. */
const ENDED = ['RUNTIME_SANDBOX_GONE', 'RUNTIME_SANDBOX_NOT_FOUND', 'SANDBOX_GONE'] as const;

export function addPort(command: Command, context: Context): void {
  const port = withExamples(
    command
      .command('port')
      .description(
        'Listens at ports of this machine and leads each connection to a port inside a sandbox made by `dsec sandbox create`, whatever network that has: what listens ' +
          'there at 127.0.0.1, ::1 or all addresses is reached. Runs until it is interrupted or the sandbox has ended. Prints where it listens.',
      ),
    [
      { line: 'dsec sandbox port work 8080', what: '127.0.0.1:8080 here leads to port 8080 inside' },
      { line: 'dsec sandbox port work 9000:80 :5432', what: 'port 9000 to 80, and any free one to 5432' },
    ],
  );
  withJson(port)
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .argument(
      '<ports...>',
      '[LOCAL:]PORT; without LOCAL the same number here, with nothing before the colon any that is free',
    )
    .option('--address <address>', 'where to listen; whoever can reach it can reach the sandbox', '127.0.0.1')
    .action(async (name: string, ports: string[], { address, json }: PortCommand) => {
      const forwards = ports.map(forwardOf);
      // An unknown one is told now, not by the first connection.
      const { name: whole } = await sandboxClient(context).get(name);
      const ended = new AbortController();
      const servers: Server[] = [];
      context.defer(() => {
        for (const server of servers) server.close();
      });
      const failed = (error: unknown) => {
        context.output.note(`dsec: ${messageOf(error)}`);
        if (ENDED.some((code) => isDsecError(error, code))) ended.abort(error);
      };
      for (const { local, inside } of forwards)
        servers.push(await listen(context, address, local, whole, inside, failed));
      const view = servers.map((server, at) => {
        const { port } = server.address() as { readonly port: number };
        return { address, port, inside: forwards[at]!.inside };
      });
      if (json) await context.output.json(view);
      const here = address.includes(':') ? `[${address}]` : address;
      for (const one of json ? [] : view) await context.output.line(`${here}:${one.port} -> ${name}:${one.inside}`);
      await Promise.race([once(context.signal, 'abort'), once(ended.signal, 'abort')]);
      if (ended.signal.aborted) throw ended.signal.reason;
    });
}

async function listen(
  context: Context,
  address: string,
  local: number,
  name: string,
  inside: number,
  failed: (error: unknown) => void,
): Promise<Server> {
  const server = createServer({ allowHalfOpen: true, pauseOnConnect: true }, (socket) => {
    socket.on('error', () => {});
    openSandboxPort(context, name, inside).then(
      (connection) => {
        connection.on('error', () => {});
        join(socket, connection);
        socket.resume();
      },
      (error: unknown) => {
        // As a port where nothing listens.
        socket.resetAndDestroy();
        failed(error);
      },
    );
  });
  try {
    server.listen({ host: address, port: local });
    await once(server, 'listening');
    return server;
  } catch (error) {
    throw fail('SANDBOX_PORT_LISTEN', { address, port: local, reason: messageOf(error) }, error);
  }
}

function forwardOf(text: string): Forward {
  const [, before, local, inside] = /^((\d{0,5}):)?(\d{1,5})$/.exec(text) ?? [];
  const forward = { local: Number(before === undefined ? inside : local || 0), inside: Number(inside) };
  if (inside === undefined || forward.inside < 1 || forward.inside > 65_535 || forward.local > 65_535) {
    const problem = `${text}: it is no [LOCAL:]PORT with numbers from 1 to 65535`;
    throw fail('CLI_USAGE', { problem, program: 'dsec sandbox port' });
  }
  return forward;
}
