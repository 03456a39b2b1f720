/**
 * A machine's state over a unix socket, between QEMU and a file: QEMU itself may start no programs and opens no files of ours. What is written to the disk fails
 * here, where it can be told, and not there.
 */
import { createReadStream, createWriteStream } from 'node:fs';
import { open, rm } from 'node:fs/promises';
import { connect, createServer, type Server, type Socket } from 'node:net';
import type { Transform } from 'node:stream';
import { finished, pipeline } from 'node:stream/promises';
import { setTimeout as delay } from 'node:timers/promises';
import { systemCode } from '#base';

const ANSWERS_MS = 60_000;

export interface StateReceiver {
  /** Bytes that are in the file, synced. @throws ENOSPC and the like */
  readonly done: Promise<number>;
  /** No more comes, and nothing is waited for. */
  close(): Promise<void>;
}

/** Takes what the first who connects to `socketPath` sends. @param through what the bytes pass on their way */
export async function receiveState(socketPath: string, filePath: string, through?: Transform): Promise<StateReceiver> {
  await rm(socketPath, { force: true });
  let client: Socket | undefined;
  let give: (socket: Socket) => void = () => {};
  let refuse: (error: Error) => void = () => {};
  const came = new Promise<Socket>((resolve, reject) => {
    give = resolve;
    refuse = reject;
  });
  const server: Server = createServer((socket) => {
    client = socket;
    server.close();
    give(socket);
  });
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject);
    server.listen(socketPath, resolve);
  });
  const done = came.then(async (socket) => {
    const file = createWriteStream(filePath, { flags: 'wx', mode: 0o600, highWaterMark: 1 << 20 });
    if (through === undefined) await pipeline(socket, file);
    else await pipeline(socket, through, file);
    const handle = await open(filePath, 'r');
    try {
      await handle.sync();
    } finally {
      await handle.close();
    }
    return file.bytesWritten;
  });
  // Whoever closes it early awaits it no more.
  done.catch(() => {});
  return {
    done,
    async close() {
      refuse(new Error('nobody waits for it any more'));
      server.close();
      client?.destroy();
      await done.catch(() => {});
      await rm(socketPath, { force: true });
    },
  };
}

/** @throws what reading or sending fails with. Ends early, without an error, when `ended` comes first. */
export async function sendFile(filePath: string, socketPath: string, ended: Promise<unknown>): Promise<void> {
  const socket = await connected(socketPath);
  const file = createReadStream(filePath, { highWaterMark: 1 << 20 });
  file.on('error', (error) => socket.destroy(error));
  // QEMU closes when it has all: the other half is of no interest.
  const sent = finished(file.pipe(socket), { readable: false });
  sent.catch(() => {});
  ended.then(() => socket.destroy());
  await Promise.race([sent, ended]);
  file.destroy();
}

async function connected(path: string): Promise<Socket> {
  const until = performance.now() + ANSWERS_MS;
  for (let pause = 2; ; pause = Math.min(20, pause * 2)) {
    const socket = connect(path);
    try {
      await new Promise<void>((resolve, reject) => {
        socket.once('connect', resolve);
        socket.once('error', reject);
      });
      return socket;
    } catch (error) {
      const early = ['ENOENT', 'ECONNREFUSED'].includes(systemCode(error) ?? '');
      if (!early || performance.now() > until) throw error;
      await delay(pause);
    }
  }
}
