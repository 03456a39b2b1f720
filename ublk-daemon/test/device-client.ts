/** Files and block devices as clients of the conformance suite have them, through another process (device-client-process.ts). */
import { type ChildProcess, fork } from 'node:child_process';
import { once } from 'node:events';
import { processEntry } from '#base';
import type { ClientReply, ClientRequest } from './device-client-process.ts';

type Ask = ClientRequest extends infer R ? (R extends ClientRequest ? Omit<R, 'id'> : never) : never;

export class DeviceClients {
  readonly #child: ChildProcess;
  readonly #pending = new Map<number, { resolve(reply: ClientReply): void; reject(error: Error): void }>();
  #lastId = 0;
  #lastClient = 0;

  constructor() {
    const [program, ...args] = processEntry('', new URL('./device-client-process.ts', import.meta.url));
    this.#child = fork(program!, args, { serialization: 'advanced', execArgv: [] });
    this.#child.on('message', (reply: ClientReply) => {
      this.#pending.get(reply.id)?.resolve(reply);
      this.#pending.delete(reply.id);
    });
    this.#child.once('exit', (status) => {
      for (const { reject } of this.#pending.values()) reject(new Error(`the client ended with ${status}`));
      this.#pending.clear();
    });
  }

  async open(path: string, readOnly: boolean): Promise<DeviceClient> {
    const client = ++this.#lastClient;
    await this.ask({ do: 'open', client, path, readOnly });
    return new DeviceClient(this, client);
  }

  async end(): Promise<void> {
    const ended = once(this.#child, 'exit');
    this.#child.disconnect();
    await ended;
  }

  async ask(request: Ask): Promise<Uint8Array | undefined> {
    const id = ++this.#lastId;
    const reply = new Promise<ClientReply>((resolve, reject) => {
      this.#pending.set(id, { resolve, reject });
    });
    this.#child.send({ ...request, id });
    const { bytes, errno, message } = await reply;
    if (errno !== undefined) throw Object.assign(new Error(message), { errno });
    return bytes;
  }
}

export class DeviceClient {
  readonly #clients: DeviceClients;
  readonly #client: number;
  #open = true;

  constructor(clients: DeviceClients, client: number) {
    this.#clients = clients;
    this.#client = client;
  }

  async read(offset: number, length: number): Promise<Buffer> {
    const bytes = await this.#clients.ask({ do: 'read', client: this.#client, offset, length });
    return Buffer.from(bytes!.buffer, bytes!.byteOffset, bytes!.length);
  }

  async write(offset: number, data: Buffer, options: { fua?: boolean } = {}): Promise<void> {
    await this.#clients.ask({ do: 'write', client: this.#client, offset, data, fua: options.fua ?? false });
  }

  async flush(): Promise<void> {
    await this.#clients.ask({ do: 'flush', client: this.#client });
  }

  async close(): Promise<void> {
    if (!this.#open) return;
    this.#open = false;
    await this.#clients.ask({ do: 'close', client: this.#client });
  }
}
