/**
 * Commands in this service's own sandboxes for a client whose command line runs here: what SandboxClient is for everybody else, without
 * asking ourselves over HTTP. It answers and fails as those routes do.
 */
import type { Readable } from 'node:stream';
import type { ExecSpec, SandboxNode } from '#runtime';
import type { OutputNews } from './output-frames.ts';
import { errorOf } from './route.ts';
import type { CommandView, SandboxClient } from './sandbox-client.ts';
import { commandView } from './sandbox-routes.ts';

export type CommandClient = Pick<SandboxClient, 'exec' | 'output' | 'input' | 'signal' | 'resize'>;

export function ownCommands(node: SandboxNode): CommandClient {
  const command = (name: string, id: number) => node.get(name).command(id);
  return {
    async exec(name: string, spec: ExecSpec): Promise<CommandView> {
      try {
        return commandView(await node.get(name).exec(spec));
      } catch (error) {
        throw errorOf(error);
      }
    },
    async *output(name: string, id: number, _from = {}, signal?: AbortSignal): AsyncGenerator<OutputNews> {
      const followed = command(name, id);
      for await (const part of followed.output({ signal })) yield { part };
      try {
        yield { result: await followed.wait() };
      } catch (error) {
        yield { error: errorOf(error) };
      }
    },
    async input(name: string, id: number, input: Readable): Promise<void> {
      const fed = command(name, id);
      for await (const bytes of input) await fed.write(bytes as Buffer);
      await fed.closeStdin();
    },
    async signal(name: string, id: number, signal: NodeJS.Signals): Promise<void> {
      command(name, id).kill(signal);
    },
    async resize(name: string, id: number, { rows, columns }): Promise<void> {
      command(name, id).resize(rows, columns);
    },
  };
}
