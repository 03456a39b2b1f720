/**
 * An NBD server: exports by name on unix sockets and loopback TCP, for any client that speaks fixed newstyle.
 *
 * It serves the targets and does not own them: whoever opened them closes them, after `close` has resolved.
 */
import { once } from 'node:events';
import { chmodSync, lstatSync, rmSync } from 'node:fs';
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net';
import { messageOf } from '#base';
import { becomeIoFlusher, isDeadSocket } from '#linux';
import { fail } from '../../errors.ts';
import { addressText, type NbdAddress, nbdUri, parseNbdAddress } from './address.ts';
import { Connection } from './connection.ts';
import { type NbdExport, type OpenExport, openExport } from './export.ts';

export interface NbdServerOptions {
  /** `unix:PATH`, `tcp:127.0.0.1:PORT`; port 0 takes a free one. */
  readonly listen: string;
  /** Names differ. Clients that name none get the one named '', else the first. */
  readonly exports: readonly NbdExport[];
  /** 128 by default; more are turned away. */
  readonly maxConnections?: number;
  /** 60 s by default. */
  readonly handshakeMs?: number;
}

export interface NbdServer {
  /** With the port that was taken. */
  readonly address: NbdAddress;
  /** `unix:PATH`, `tcp:HOST:PORT` */
  readonly addressText: string;
  /** Clients now. */
  readonly connections: number;
  uri(exportName?: string): string;
  /** Adds a disk while others are served. @throws NBD_EXPORT_NAME */
  add(given: NbdExport): void;
  /** Ends the clients of an export, after what they have at work; resolves when nothing touches its target. */
  remove(exportName: string): Promise<void>;
  /**
   * Takes no more clients and requests, answers what is at work and ends; clients that do not take their answers within
   * `graceMs` (5 s by default) lose them. Twice is no error.
   */
  close(graceMs?: number): Promise<void>;
}

/** @throws NBD_ADDRESS, NBD_EXPORT_NAME, NBD_LISTEN */
export async function serveNbd(options: NbdServerOptions): Promise<NbdServer> {
  const address = parseNbdAddress(options.listen);
  // The client may be the kernel of this machine.
  becomeIoFlusher();
  const serving = new Serving(options);
  await serving.listen(address);
  return serving;
}

const HANDSHAKE_MS = 60_000;
const MAX_CONNECTIONS = 128;
const GRACE_MS = 5000;

class Serving implements NbdServer {
  readonly #exports = new Map<string, OpenExport>();
  readonly #connections = new Map<Connection, OpenExport | undefined>();
  readonly #server: Server;
  readonly #handshakeMs: number;
  readonly #maxConnections: number;
  #address: NbdAddress | undefined;
  /** The socket file is ours to remove while it is the one we made. */
  #inode: bigint | undefined;
  #closed: Promise<void> | undefined;

  constructor({ exports, handshakeMs = HANDSHAKE_MS, maxConnections = MAX_CONNECTIONS }: NbdServerOptions) {
    this.#handshakeMs = handshakeMs;
    this.#maxConnections = maxConnections;
    for (const given of exports) this.add(given);
    // A client that has said all may still be owed answers.
    this.#server = createServer({ allowHalfOpen: true }, (socket) => this.#accept(socket));
  }

  async listen(address: NbdAddress): Promise<void> {
    try {
      if (address.kind === 'unix' && (await isDeadSocket(address.path))) rmSync(address.path, { force: true });
      if (address.kind === 'unix') this.#server.listen(address.path);
      else this.#server.listen(address.port, address.host);
      await once(this.#server, 'listening');
      if (address.kind === 'unix') {
        chmodSync(address.path, 0o600);
        this.#inode = lstatSync(address.path, { bigint: true }).ino;
        this.#address = address;
      } else this.#address = { ...address, port: (this.#server.address() as AddressInfo).port };
    } catch (error) {
      this.#server.close();
      throw fail('NBD_LISTEN', { address: addressText(address), reason: messageOf(error) }, error);
    }
    // A connection that cannot be accepted (no descriptors left, say) is not the end of the others.
    this.#server.on('error', () => {});
  }

  get address(): NbdAddress {
    return this.#address!;
  }

  get addressText(): string {
    return addressText(this.address);
  }

  get connections(): number {
    return this.#connections.size;
  }

  uri(exportName = ''): string {
    return nbdUri(this.address, exportName);
  }

  add(given: NbdExport): void {
    if (this.#exports.has(given.name)) throw fail('NBD_EXPORT_NAME', { name: given.name, problem: 'it is taken' });
    this.#exports.set(given.name, openExport(given));
  }

  async remove(exportName: string): Promise<void> {
    const found = this.#exports.get(exportName);
    if (found === undefined) return;
    this.#exports.delete(exportName);
    await this.#end([...this.#connections].filter(([, used]) => used === found).map(([connection]) => connection));
  }

  close(graceMs = GRACE_MS): Promise<void> {
    this.#closed ??= this.#close(graceMs);
    return this.#closed;
  }

  async #close(graceMs: number): Promise<void> {
    const { address } = this;
    // libuv removes the socket file by its name: not when another server has taken its place.
    const stopped = new Promise<void>((done) => this.#server.close(() => done()));
    await this.#end([...this.#connections.keys()], graceMs);
    await stopped;
    if (address.kind === 'unix' && inodeOf(address.path) === this.#inode) rmSync(address.path, { force: true });
  }

  async #end(connections: readonly Connection[], graceMs = GRACE_MS): Promise<void> {
    const left = Promise.all(connections.map((connection) => connection.leave()));
    const timer = setTimeout(() => {
      for (const connection of connections) connection.destroy();
    }, graceMs);
    await left;
    clearTimeout(timer);
  }

  #accept(socket: Socket): void {
    if (this.#connections.size >= this.#maxConnections || this.#closed !== undefined) {
      socket.destroy();
      return;
    }
    const connection = new Connection(socket, {
      exports: this.#exports,
      handshakeMs: this.#handshakeMs,
      onAgreed: (found) => this.#connections.set(connection, found),
    });
    this.#connections.set(connection, undefined);
    connection.ended.then(() => this.#connections.delete(connection));
  }
}

function inodeOf(path: string): bigint | undefined {
  return lstatSync(path, { bigint: true, throwIfNoEntry: false })?.ino;
}
