/**
 * Clients of files and block devices that another process serves, in a process of their own: a thread of the server that waited for the
 * server could not be killed. Requests and answers are IPC messages.
 */
import { constants } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { addressOf } from '#linux';

export type ClientRequest = { readonly id: number; readonly client: number } & (
  | { readonly do: 'open'; readonly path: string; readonly readOnly: boolean }
  | { readonly do: 'read'; readonly offset: number; readonly length: number }
  | { readonly do: 'write'; readonly offset: number; readonly data: Uint8Array; readonly fua: boolean }
  | { readonly do: 'flush' | 'close' }
);

export interface ClientReply {
  readonly id: number;
  readonly bytes?: Uint8Array;
  readonly errno?: number;
  readonly message?: string;
}

/** Not in Node's constants on every platform. */
const O_DIRECT = 0o40000;

const clients = new Map<number, { readonly handle: FileHandle; readonly durable: FileHandle }>();

process.on('disconnect', () => process.exit(0));
process.on('message', async (request: ClientRequest) => {
  const reply: ClientReply = { id: request.id, ...(await answer(request)) };
  process.send!(reply);
});

async function answer(request: ClientRequest): Promise<Omit<ClientReply, 'id'>> {
  try {
    return { bytes: await carryOut(request) };
  } catch (error) {
    const { errno, message } = error as NodeJS.ErrnoException;
    return { errno: Math.abs(errno ?? 5), message };
  }
}

async function carryOut(request: ClientRequest): Promise<Uint8Array | undefined> {
  if (request.do === 'open') {
    const access = (request.readOnly ? constants.O_RDONLY : constants.O_RDWR) | O_DIRECT;
    const handle = await open(request.path, access);
    clients.set(request.client, { handle, durable: await open(request.path, access | constants.O_DSYNC) });
    return undefined;
  }
  const { handle, durable } = clients.get(request.client)!;
  switch (request.do) {
    case 'read': {
      const bytes = aligned(request.length);
      const { bytesRead } = await handle.read(bytes, 0, bytes.length, request.offset);
      if (bytesRead !== request.length) throw new Error(`${bytesRead} bytes of ${request.length}`);
      return bytes;
    }
    case 'write': {
      const bytes = aligned(request.data.length);
      bytes.set(request.data);
      await put(request.fua ? durable : handle, bytes, request.offset);
      return undefined;
    }
    case 'flush':
      await handle.datasync();
      return undefined;
    case 'close':
      await handle.close();
      await durable.close();
      clients.delete(request.client);
      return undefined;
  }
}

async function put(into: FileHandle, bytes: Buffer, offset: number): Promise<void> {
  const { bytesWritten } = await into.write(bytes, 0, bytes.length, offset);
  if (bytesWritten !== bytes.length) throw new Error(`${bytesWritten} bytes of ${bytes.length}`);
}

/** Around the page cache a buffer has to begin at a multiple of the block. */
function aligned(length: number): Buffer {
  const bytes = Buffer.allocUnsafeSlow(length + 4096);
  const at = (4096 - (addressOf(bytes) % 4096)) % 4096;
  return bytes.subarray(at, at + length);
}
