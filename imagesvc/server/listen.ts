/**
 * Where the service listens: `HOST:PORT` or `unix:/path`. A socket file is its user's alone (0600), and one that a dead service
 * left is replaced.
 */
import { rmSync } from 'node:fs';
import { resolve } from 'node:path';
import { messageOf } from '#base';
import { isDeadSocket } from '#linux';
import { fail } from '../errors.ts';
import type { App } from './app-types.ts';

export type ListenAddress =
  | { readonly kind: 'tcp'; readonly host: string; readonly port: number; readonly loopback: boolean }
  | { readonly kind: 'unix'; readonly path: string };

/** @throws SERVER_LISTEN */
export function parseListenAddress(text: string): ListenAddress {
  if (text.startsWith('unix:')) {
    const path = text.slice('unix:'.length);
    // sun_path has 108 bytes.
    if (path === '' || Buffer.byteLength(resolve(path)) > 107) {
      throw fail('SERVER_LISTEN', { address: text, reason: 'a socket needs a path of at most 107 bytes' });
    }
    return { kind: 'unix', path: resolve(path) };
  }
  const match = /^(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9.-]+)):(\d{1,5})$/.exec(text);
  const port = Number(match?.[3]);
  if (match === null || port > 65_535) throw fail('SERVER_LISTEN', { address: text, reason: 'it is not HOST:PORT' });
  const host = (match[1] ?? match[2])!;
  return { kind: 'tcp', host, port, loopback: /^(127(\.\d+){3}|::1|localhost)$/.test(host) };
}

/** Listens, and says where: `http://HOST:PORT` or `unix:/path`. @throws SERVER_LISTEN */
export async function listen(app: App, address: ListenAddress): Promise<string> {
  try {
    if (address.kind === 'tcp') {
      await app.listen({ host: address.host, port: address.port });
      const bound = app.server.address();
      const port = typeof bound === 'object' && bound !== null ? bound.port : address.port;
      return `http://${address.host.includes(':') ? `[${address.host}]` : address.host}:${port}`;
    }
    if (await isDeadSocket(address.path)) rmSync(address.path);
    const mask = process.umask(0o177);
    try {
      await app.listen({ path: address.path });
    } finally {
      process.umask(mask);
    }
    return `unix:${address.path}`;
  } catch (error) {
    const named = address.kind === 'tcp' ? `${address.host}:${address.port}` : `unix:${address.path}`;
    throw fail('SERVER_LISTEN', { address: named, reason: messageOf(error) }, error);
  }
}
