/**
 * The serial console of a machine: a socket that the machine listens on. We read always, keep what came last, and write that to console.log now
 * and then; so a guest that prints without end costs neither disk nor a blocked machine.
 */
import { once } from 'node:events';
import { writeFile } from 'node:fs/promises';
import { connect, type Socket } from 'node:net';
import type { VmConsole } from '../vm-driver.ts';

const MOST_KEPT = 64 * 1024;
const WRITE_AFTER_MS = 500;

export class SerialConsole implements VmConsole {
  private readonly socket: Socket;
  private readonly logPath: string;
  private readonly listeners = new Set<(bytes: Buffer) => void>();
  private kept: Buffer = Buffer.alloc(0);
  private timer: NodeJS.Timeout | undefined;
  private saving: Promise<void> = Promise.resolve();

  /** @throws ENOENT, ECONNREFUSED */
  static async connect(path: string, logPath: string): Promise<SerialConsole> {
    const socket = connect(path);
    await new Promise<void>((resolve, reject) => {
      socket.once('connect', resolve);
      socket.once('error', reject);
    });
    return new SerialConsole(socket, logPath);
  }

  /** Of a stream that is there: what Firecracker prints. */
  static over(socket: Socket, logPath: string): SerialConsole {
    return new SerialConsole(socket, logPath);
  }

  private constructor(socket: Socket, logPath: string) {
    this.socket = socket;
    this.logPath = logPath;
    socket.on('data', (bytes: Buffer) => this.take(bytes));
    socket.on('error', () => {});
  }

  recent(): Buffer {
    return this.kept;
  }

  follow(listener: (bytes: Buffer) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Resolves when more can be written: the guest reads as it likes. */
  async write(bytes: Buffer, signal?: AbortSignal): Promise<void> {
    const { socket } = this;
    if (socket.destroyed || socket.write(bytes)) return;
    const over = new AbortController();
    const either = signal === undefined ? over.signal : AbortSignal.any([signal, over.signal]);
    await Promise.race([once(socket, 'drain', { signal: either }), once(socket, 'close', { signal: either })]).finally(
      () => over.abort(),
    );
  }

  /** What came is in the log then. */
  async close(): Promise<void> {
    this.socket.destroy();
    clearTimeout(this.timer);
    this.save();
    await this.saving;
  }

  private take(bytes: Buffer): void {
    const all = Buffer.concat([this.kept, bytes]);
    this.kept = all.length > MOST_KEPT ? Buffer.from(all.subarray(all.length - MOST_KEPT)) : all;
    for (const listener of this.listeners) listener(bytes);
    this.timer ??= setTimeout(() => this.save(), WRITE_AFTER_MS).unref();
  }

  private save(): void {
    this.timer = undefined;
    // A full disk, or a folder that has gone: the log is for people, and nothing hangs on it.
    this.saving = this.saving.then(() => writeFile(this.logPath, this.kept, { mode: 0o600 })).catch(() => {});
  }
}
