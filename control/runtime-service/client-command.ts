/**
 * One command line of a client of the runtime service, run in this process as main.ts runs one in a process of its own: the same
 * code, the same output, the same exit status. What differs stands in `Context.caller`.
 */

import { constants } from 'node:os';
import { Writable } from 'node:stream';
import type { SandboxNode, ServiceClient } from '#runtime';
import type { Caller, Cleanup, Context } from '../cli/context.ts';
import { NotServed } from '../cli/context.ts';
import { runCommandLine } from '../cli/main.ts';
import { Output } from '../cli/output.ts';
import { failureOf } from '../cli/report-error.ts';
import { ownCommands } from './own-commands.ts';
import { isServableStore, type ServiceSelf } from './servable.ts';

/** The client has been told how it ended, or has gone. @param stop Ends the sandbox. */
export async function runForClient(
  client: ServiceClient,
  args: readonly string[],
  self: ServiceSelf,
  node: SandboxNode,
  stop?: AbortSignal,
): Promise<void> {
  const { greeting } = client;
  const ending = new AbortController();
  let endedBy: number | undefined;
  let handler: ((signal: NodeJS.Signals) => void) | undefined;
  const cleanups: Cleanup[] = [];
  const end = (status: number) => {
    endedBy ??= status;
    ending.abort();
  };
  client.gone.addEventListener('abort', () => end(128 + constants.signals.SIGKILL), { once: true });
  stop?.addEventListener('abort', () => end(128 + constants.signals.SIGTERM), { once: true });
  client.takeSignals((signal) => {
    if (handler !== undefined) handler(signal);
    else if (ENDING.has(signal)) end(128 + constants.signals[signal]);
  });
  const caller: Caller = {
    env: greeting.env,
    stdinIsTerminal: greeting.terminals[0],
    stdinIsNull: greeting.inputIsNull,
    terminalSize: greeting.terminalSize,
    backend: client.backend,
    commands: ownCommands(node),
    get stdin() {
      return client.input;
    },
    begin({ store, runtime }) {
      const url = store ?? greeting.env.DSEC_STORE;
      const own = runtime === undefined ? greeting.env.DSEC_OCI_RUNTIME : runtime;
      if (!isServableStore(url, greeting.env, self.env) || (own !== undefined && own !== '' && own !== 'dsec')) {
        throw new NotServed();
      }
      client.accept();
    },
  };
  const stdout = clientStream(client, 'stdout', greeting.terminals[1]);
  const stderr = clientStream(client, 'stderr', greeting.terminals[2]);
  const context: Context = {
    signal: ending.signal,
    output: new Output(stdout, stderr, () => {}),
    progress: () => {},
    defer: (cleanup) => cleanups.push(cleanup),
    takeSignals: (taken) => {
      handler = taken;
    },
    caller,
    exitCode: 0,
  };
  let status: number;
  try {
    await runCommandLine(args, context);
    status = context.exitCode;
  } catch (error) {
    if (error instanceof NotServed) return client.decline();
    if (endedBy === undefined) {
      const { text, exit } = failureOf(error, args, greeting.env);
      client.output('stderr', Buffer.from(text));
      status = exit;
    } else status = endedBy;
  }
  for (let cleanup = cleanups.pop(); cleanup !== undefined; cleanup = cleanups.pop()) {
    await Promise.resolve(cleanup()).catch(() => {});
  }
  // Nothing is written after the end.
  await Promise.all([stdout, stderr].map((stream) => new Promise<void>((done) => stream.end(() => done()))));
  client.exit(status);
}

const ENDING: ReadonlySet<NodeJS.Signals> = new Set<NodeJS.Signals>(['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT']);

function clientStream(
  client: ServiceClient,
  stream: 'stdout' | 'stderr',
  isTTY: boolean,
): Writable & { isTTY?: boolean } {
  const writable = new Writable({
    write(chunk: Buffer, _encoding, done) {
      client.output(stream, chunk);
      client.drained().then(() => done());
    },
  });
  return Object.assign(writable, { isTTY });
}
