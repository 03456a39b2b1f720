/**
 * `dsec run` with a network policy: links, rules and the resolver are the runtime service's, so it makes the sandbox, runs the one command
 * in it and removes it, or keeps its changes, as `dsec run` does by itself without one. Should this process be killed, the service
 * ends the sandbox a little later.
 */
import { isDsecError } from '#base';
import { openImage, readConfig } from '#imagesvc';
import { type AllLimits, commandOf, type NetworkPolicy, randomSandboxName } from '#runtime';
import { SandboxClient } from '../../runtime-service/sandbox-client.ts';
import { type Context, NotServed } from '../context.ts';
import { type SandboxOptions, usernsOf } from '../sandbox-options.ts';
import { openChosenStore, type StoreOption } from '../store-option.ts';
import { variables } from '../variables.ts';
import { execIn } from './sandbox-resident.ts';

export interface PolicyRun extends StoreOption, SandboxOptions {
  readonly name?: string;
  readonly keep?: boolean;
  readonly replace?: boolean;
  readonly lazy?: boolean;
  readonly prefetch: boolean;
  readonly json?: boolean;
}

/** Nobody follows its command any more: this process was killed. */
const IDLE_MS = 20_000;
/** What its command has left behind has so long to end. */
const STOP_MS = 0;
const PROGRAM = 'dsec run';

/** Sets the exit status. @throws what the creation does; how the command did not start is told as `dsec sandbox exec` tells it */
export async function runWithPolicy(
  image: string,
  command: readonly string[],
  options: PolicyRun,
  limits: AllLimits,
  policy: NetworkPolicy | undefined,
  context: Context,
): Promise<void> {
  // A service that runs this would ask itself; the client's own process asks as well.
  if (context.caller !== undefined) throw new NotServed();
  const store = await openChosenStore(options);
  const base = await openImage(store, image);
  const entrypoint = options.entrypoint === undefined ? undefined : [options.entrypoint];
  const args = commandOf(base.name, await readConfig(store, base), command, entrypoint);
  const env = variables(PROGRAM, options.env, context);
  const client = new SandboxClient();
  const { keep = false, replace = false, workspace, toolkit, user, workdir, lazy, prefetch } = options;
  if (replace && options.name !== undefined) await removeKept(client, options.name);
  const name = options.name ?? randomSandboxName();
  const end = () => (keep ? client.stop(name, STOP_MS) : client.remove(name, true));
  const isGone = (error: unknown) =>
    isDsecError(error, 'RUNTIME_SANDBOX_GONE') || isDsecError(error, 'RUNTIME_SANDBOX_NOT_FOUND');
  // Interrupted before there is an answer: of a random name it can only be ours. Of another the service ends it when nobody uses it.
  let isMine = options.name === undefined;
  context.defer(async () => {
    if (!isMine) return;
    await end().catch((error) => {
      if (!isGone(error)) throw error;
    });
  });
  await client
    .create({
      store: store.url,
      image,
      workspace,
      toolkits: toolkit,
      name,
      env,
      user,
      workdir,
      userns: usernsOf(options),
      runtime: options.runtime,
      ...limits,
      network: { mode: 'policy', policy },
      lazy,
      prefetch,
      idleMs: IDLE_MS,
      removeAtEnd: !keep,
    })
    .catch((error) => {
      isMine = false;
      throw error;
    });
  isMine = true;
  const result = await execIn(name, args, { tty: options.tty, stdin: true, client, followed: true }, context);
  if (result !== undefined && options.json) {
    const { exitCode, signal, outOfMemory } = result;
    context.output.note(JSON.stringify({ exitCode, signal, outOfMemory, name }));
  } else if (keep) {
    context.output.note(`dsec: kept as ${name}; dsec pack-diff ${name} --name NAME:TAG makes an image of its changes`);
  }
}

async function removeKept(client: SandboxClient, name: string): Promise<void> {
  try {
    await client.remove(name, false);
  } catch (error) {
    if (!isDsecError(error, 'RUNTIME_SANDBOX_NOT_FOUND')) throw error;
  }
}
