/**
 * How commands speak with a data server: a unix socket, one line of JSON a request, one a reply, in order. Both ends must be
 * root; the kernel says who they are. `<run>/data/<id>/sock` is served by the supervisor, which outlives its servers.
 */
import { closeSync, constants, openSync, rmSync } from 'node:fs';
import { type AddressInfo, createConnection, createServer, type Server, type Socket } from 'node:net';
import { basename, dirname } from 'node:path';
import { createInterface, type Interface } from 'node:readline';
import { isDsecError, messageOf } from '#base';
import type { ByteRange } from '#chunk-cache';
import { peerOf } from '#linux';
import type { LayerFiles } from '../layer-server/layer-facts.ts';

export type ControlRequest =
  /** Shows a blob. `chunkDigests`: base64. */
  | { readonly op: 'add'; readonly digest: string; readonly sizeBytes: number; readonly chunkDigests: string }
  /** Of the layer server: shows a layer. */
  | { readonly op: 'add-layer'; readonly layer: LayerFiles }
  /** What is in the cache on disk: `StoredBlob`s. */
  | { readonly op: 'cached' }
  /** Takes blobs out of the cache, but for those that a mount names. Answered with those that went. */
  | { readonly op: 'forget'; readonly digests: readonly string[] }
  | { readonly op: 'status' }
  | { readonly op: 'stats' }
  /** Fetches ranges of a blob ahead of its readers, in this order; answered when it has begun. */
  | { readonly op: 'prefetch'; readonly digest: string; readonly ranges: readonly ByteRange[] }
  /** What the cache has of a blob. */
  | { readonly op: 'chunks'; readonly digest: string }
  /** What was read since it started to record (`record` of its configuration). */
  | { readonly op: 'recorded' }
  /** Unmounts and ends. `force`: also while mounts use it. */
  | { readonly op: 'stop'; readonly force?: boolean }
  /** Puts a new version in the serving one's place. `server`: its command line, for the same Node. */
  | { readonly op: 'replace'; readonly server: readonly string[]; readonly version: string };

export type ControlReply =
  | { readonly ok: true; readonly value: unknown }
  | { readonly ok: false; readonly code: string; readonly message: string };

/** Chunk digests of a blob of 100 GB are 17 MB of base64. */
const LINE_LIMIT_BYTES = 64 * 1024 * 1024;
const ADDRESS_LIMIT_BYTES = 100;

export async function serveControl(
  path: string,
  answer: (request: ControlRequest) => Promise<unknown>,
): Promise<{ close(): void }> {
  rmSync(path, { force: true });
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.once('close', () => sockets.delete(socket));
    socket.on('error', () => socket.destroy());
    if (peerOf(socket)?.uid !== 0) {
      socket.destroy();
      return;
    }
    let received = 0;
    socket.on('data', (bytes: Buffer) => {
      received = bytes.includes(10) ? 0 : received + bytes.length;
      if (received > LINE_LIMIT_BYTES) socket.destroy();
    });
    let turn = Promise.resolve();
    linesOf(socket).on('line', (line) => {
      turn = turn.then(async () => {
        const reply = await replyTo(line, answer);
        if (!socket.destroyed) socket.write(`${JSON.stringify(reply)}\n`);
      });
    });
  });
  await withShortPath(path, (short) => listen(server, short));
  return {
    close() {
      server.close();
      for (const socket of sockets) socket.end();
      rmSync(path, { force: true });
    },
  };
}

/** An interface tells of errors of its input once more, and one that nobody hears ends the process. */
function linesOf(socket: Socket): Interface {
  return createInterface({ input: socket }).on('error', () => {});
}

async function replyTo(line: string, answer: (request: ControlRequest) => Promise<unknown>): Promise<ControlReply> {
  try {
    const request = JSON.parse(line) as ControlRequest;
    if (typeof request !== 'object' || request === null) throw new Error('this is no request');
    return { ok: true, value: (await answer(request)) ?? null };
  } catch (error) {
    return { ok: false, code: isDsecError(error) ? error.code : 'FAILED', message: messageOf(error) };
  }
}

function listen(server: Server, path: string): Promise<AddressInfo | string | null> {
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    server.listen({ path, readableAll: false, writableAll: false }, () => resolve(server.address()));
  });
}

/** One request. @throws ECONNREFUSED or ENOENT when nobody serves; ECONNRESET when it ends meanwhile; ETIMEDOUT */
export async function askControl(path: string, request: ControlRequest, timeoutMs = 60_000): Promise<ControlReply> {
  const socket = await withShortPath(path, connect);
  try {
    return await new Promise((resolve, reject) => {
      const timer = setTimeout(
        () => reject(Object.assign(new Error(`no answer within ${timeoutMs / 1000} s`), { code: 'ETIMEDOUT' })),
        timeoutMs,
      );
      const gone = () => reject(Object.assign(new Error('it ended before it answered'), { code: 'ECONNRESET' }));
      socket.once('error', reject).once('close', () => {
        clearTimeout(timer);
        gone();
      });
      linesOf(socket).once('line', (line) => {
        clearTimeout(timer);
        try {
          resolve(JSON.parse(line) as ControlReply);
        } catch (error) {
          reject(error);
        }
      });
      socket.write(`${JSON.stringify(request)}\n`);
    });
  } finally {
    socket.destroy();
  }
}

function connect(path: string): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const socket = createConnection({ path });
    socket.once('error', reject);
    socket.once('connect', () => {
      socket.off('error', reject);
      resolve(socket);
    });
  });
}

/** The address of a unix socket has 108 bytes: a longer path goes by a descriptor of its folder. */
async function withShortPath<T>(path: string, use: (path: string) => Promise<T>): Promise<T> {
  if (Buffer.byteLength(path) <= ADDRESS_LIMIT_BYTES) return use(path);
  const folder = openSync(dirname(path), constants.O_RDONLY | constants.O_DIRECTORY);
  try {
    return await use(`/proc/self/fd/${folder}/${basename(path)}`);
  } finally {
    closeSync(folder);
  }
}
