/**
 * As little of an HTTP client as a benchmark of a server needs: the same request again and again over connections that stay. What measures shares the
 * processors with what is measured; a client made for everything costs as much as the server does.
 */
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';

export interface RawRequest {
  readonly method: string;
  readonly path: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string;
}

const END_OF_HEAD = '\r\n\r\n';

export class RawConnection {
  readonly #socket: Socket;
  readonly #bytes: Buffer;
  #heard: Buffer[] = [];
  #size = 0;
  #whole = 0;
  #status = 0;
  #answered: ((status: number) => void) | undefined;
  #failed: ((error: Error) => void) | undefined;
  /** The last answer, whole. */
  #last: readonly Buffer[] = [];

  private constructor(socket: Socket, bytes: Buffer) {
    this.#socket = socket;
    this.#bytes = bytes;
    socket.setNoDelay(true);
    socket.on('data', (part) => this.#take(part));
    socket.on('error', (error) => this.#failed?.(error));
    socket.on('close', () => this.#failed?.(new Error('the connection was closed')));
  }

  static async open(url: string, { method, path, headers, body }: RawRequest): Promise<RawConnection> {
    const { hostname, port, host } = new URL(url);
    const socket = connect(Number(port), hostname);
    await once(socket, 'connect');
    const lines = [
      `${method} ${path} HTTP/1.1`,
      `Host: ${host}`,
      ...Object.entries(headers).map(([name, value]) => `${name}: ${value}`),
      `Content-Length: ${Buffer.byteLength(body)}`,
    ];
    return new RawConnection(socket, Buffer.from(`${lines.join('\r\n')}${END_OF_HEAD}${body}`));
  }

  /** Once more. The status of its answer. */
  ask(): Promise<number> {
    return new Promise((resolve, reject) => {
      this.#answered = resolve;
      this.#failed = reject;
      this.#socket.write(this.#bytes);
    });
  }

  /** Of the last answer, with its head. */
  text(): string {
    return Buffer.concat(this.#last).toString();
  }

  close(): void {
    this.#failed = undefined;
    this.#socket.destroy();
  }

  #take(part: Buffer): void {
    this.#heard.push(part);
    this.#size += part.length;
    if (this.#whole === 0) this.#readHead();
    if (this.#whole === 0 || this.#size < this.#whole) return;
    this.#last = this.#heard;
    this.#heard = [];
    this.#size = 0;
    this.#whole = 0;
    this.#answered?.(this.#status);
  }

  #readHead(): void {
    const text = Buffer.concat(this.#heard).toString('latin1');
    const end = text.indexOf(END_OF_HEAD);
    if (end < 0) return;
    const length = /^content-length: (\d+)/im.exec(text.slice(0, end))?.[1];
    if (length === undefined) throw new Error(`an answer without a length: ${text.slice(0, end)}`);
    this.#status = Number(text.slice(9, 12));
    this.#whole = end + END_OF_HEAD.length + Number(length);
  }
}
