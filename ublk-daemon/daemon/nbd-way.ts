/**
 * The way out that works everywhere: a server of its own for each disk, on a unix socket in the run folder or where the caller wants it.
 * Clients of a daemon that died lose their connection, and find the next one at the same address.
 */
import { readdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { isDeadSocket } from '#linux';
import type { BlockTarget } from '../target/block-target.ts';
import { type NbdServer, serveNbd } from '../target/nbd/server.ts';
import type { Attachment, WayOptions, WayOut } from './way-out.ts';

/** A client that has just ended is seen a moment later. */
const GOING_MS = 1000;
const SOCKET = /\.nbd$/;

export const nbdWay: WayOut = {
  name: 'nbd',
  async available() {
    return undefined;
  },
  attach: (target, options) => serve(target, options, options.address),
  recover: (record, target, options) => serve(target, options, String(record.address)),
  async forget({ address }) {
    const path = /^unix:(.*)/s.exec(String(address))?.[1];
    if (path !== undefined && (await isDeadSocket(path))) rmSync(path, { force: true });
  },
  async sweep(records, { runDir }) {
    const kept = new Set(records.map(({ address }) => address));
    const removed: string[] = [];
    for (const name of readdirSync(runDir)) {
      const path = join(runDir, name);
      if (!SOCKET.test(name) || kept.has(`unix:${path}`) || !(await isDeadSocket(path))) continue;
      rmSync(path, { force: true });
      removed.push(path);
    }
    return removed;
  },
};

async function serve(target: BlockTarget, options: WayOptions, address?: string): Promise<Attachment> {
  const { name, label, readOnly, runDir } = options;
  const listen = address ?? `unix:${join(runDir, `${label}.nbd`)}`;
  const server = await serveNbd({ listen, exports: [{ name, target, readOnly }] });
  return {
    at: server.uri(name),
    record: { address: server.addressText },
    usedBy: () => clientsOf(server),
    detach: (graceMs) => server.close(graceMs),
  };
}

async function clientsOf(server: NbdServer): Promise<string | undefined> {
  for (const until = Date.now() + GOING_MS; server.connections > 0; await delay(10)) {
    if (Date.now() > until) return server.connections === 1 ? 'a client' : `${server.connections} clients`;
  }
  return undefined;
}
