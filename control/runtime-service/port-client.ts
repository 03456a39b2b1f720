/** A connection to a port inside a sandbox, through the runtime service (port-routes.ts) or the API of a cluster. */
import type { Duplex } from 'node:stream';
import { messageOf } from '#base';
import { runtimeFolders } from '#runtime';
import { fail } from '../errors.ts';
import { TCP_PROTOCOL } from './port-streams.ts';
import { sandboxSocket, thrownThere } from './sandbox-client.ts';
import { connectionProblem, requestTo, type ServiceAddress } from './service-address.ts';

/** @throws RUNTIME_PORT_CLOSED, RUNTIME_SANDBOX_NOT_FOUND, RUNTIME_SANDBOX_GONE, SANDBOX_NO_SERVICE */
export function openPort(
  sandbox: string,
  port: number,
  address: ServiceAddress = sandboxSocket(runtimeFolders().runDir),
): Promise<Duplex> {
  return new Promise((resolve, reject) => {
    const asked = requestTo(address, {
      method: 'POST',
      path: `/v1/sandboxes/${encodeURIComponent(sandbox)}/ports/${port}`,
      headers: { connection: 'Upgrade', upgrade: TCP_PROTOCOL },
    });
    asked.once('upgrade', (_answer, socket: Duplex, head: Buffer) => {
      if (head.length > 0) socket.unshift(head);
      resolve(socket);
    });
    asked.once('response', async (answer) => {
      const parts: Buffer[] = [];
      try {
        for await (const bytes of answer) parts.push(bytes as Buffer);
        reject(thrownThere(Buffer.concat(parts).toString()));
      } catch (error) {
        reject(fail('SANDBOX_PROTOCOL', { problem: messageOf(error) }, error));
      }
    });
    asked.once('error', (error) => reject(connectionProblem(address, error)));
    asked.end();
  });
}
