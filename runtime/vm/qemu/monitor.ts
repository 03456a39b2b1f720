/**
 * A client of QEMU's monitor protocol (QMP): JSON objects, a line each, over a unix socket. Answers carry the number of their question; events come
 * whenever they like.
 *
 * A guest that takes QEMU over can send what it wants: lines are bounded, what is no answer of ours is dropped, and what is no JSON ends the
 * connection. Every question is answered: by QEMU, by the end of the connection, or by the time-out.
 */
import { connect, type Socket } from 'node:net';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';
import type { VmMonitor } from '../vm-driver.ts';

const MAX_LINE_BYTES = 4 * 1024 * 1024;
const ANSWER_MS = 60_000;

export interface MonitorEvent {
  readonly name: string;
  readonly data: Readonly<Record<string, unknown>>;
}

interface Question {
  readonly command: string;
  readonly resolve: (value: unknown) => void;
  readonly reject: (error: Error) => void;
  readonly timer: NodeJS.Timeout;
}

export class Monitor implements VmMonitor {
  readonly closed: Promise<void>;
  private readonly id: string;
  private readonly socket: Socket;
  private readonly questions = new Map<number, Question>();
  private readonly listeners = new Set<(event: MonitorEvent) => void>();
  private parts: Buffer[] = [];
  private partBytes = 0;
  private last = 0;
  private broken: string | undefined;
  private greet: (() => void) | undefined;

  /** Resolves when QEMU takes commands. @throws VM_MONITOR, ENOENT, ECONNREFUSED */
  static async connect(path: string, id: string, { timeoutMs = ANSWER_MS } = {}): Promise<Monitor> {
    const socket = connect(path);
    await new Promise<void>((resolve, reject) => {
      socket.once('connect', resolve);
      socket.once('error', reject);
    });
    const monitor = new Monitor(socket, id);
    const greeting = new Promise<void>((resolve) => {
      monitor.greet = resolve;
    });
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, timeoutMs);
    });
    // It greets whoever is connected alone; another client may be.
    await Promise.race([greeting, monitor.closed, late]);
    clearTimeout(timer);
    if (monitor.greet !== undefined) {
      monitor.close();
      throw fail('VM_MONITOR', { id, command: 'greeting', problem: monitor.broken ?? 'none came' });
    }
    await monitor.execute('qmp_capabilities');
    return monitor;
  }

  private constructor(socket: Socket, id: string) {
    this.id = id;
    this.socket = socket;
    socket.on('data', (bytes: Buffer) => this.take(bytes));
    socket.on('error', (error) => this.end(messageOf(error)));
    this.closed = new Promise((resolve) => {
      socket.once('close', () => {
        this.end('the connection is closed');
        resolve();
      });
    });
  }

  execute(command: string, args?: object, { timeoutMs = ANSWER_MS } = {}): Promise<unknown> {
    if (this.broken !== undefined) {
      return Promise.reject(fail('VM_MONITOR', { id: this.id, command, problem: this.broken }));
    }
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        this.questions.delete(id);
        reject(fail('VM_MONITOR', { id: this.id, command, problem: `no answer within ${timeoutMs / 1000} s` }));
      }, timeoutMs);
      this.questions.set(id, { command, resolve, reject, timer });
      this.socket.write(`${JSON.stringify({ execute: command, arguments: args, id })}\n`);
    });
  }

  /** Returns what ends it. */
  onEvent(listener: (event: MonitorEvent) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  close(): void {
    this.socket.destroy();
  }

  private take(bytes: Buffer): void {
    let from = 0;
    for (;;) {
      const end = bytes.indexOf(10, from);
      if (end === -1) break;
      const line = Buffer.concat([...this.parts, bytes.subarray(from, end)]);
      this.parts = [];
      this.partBytes = 0;
      from = end + 1;
      this.takeLine(line.toString('utf8'));
      if (this.broken !== undefined) return;
    }
    if (from === bytes.length) return;
    this.parts.push(bytes.subarray(from));
    this.partBytes += bytes.length - from;
    if (this.partBytes > MAX_LINE_BYTES) this.refuse(`a line of more than ${MAX_LINE_BYTES} bytes`);
  }

  private takeLine(line: string): void {
    if (line.trim() === '') return;
    let message: unknown;
    try {
      message = JSON.parse(line);
    } catch {
      this.refuse(`what it says is no JSON: ${JSON.stringify(line.slice(0, 80))}`);
      return;
    }
    if (!isObject(message)) return;
    if ('QMP' in message) {
      this.greet?.();
      this.greet = undefined;
    } else if (typeof message.event === 'string') {
      const event = { name: message.event, data: isObject(message.data) ? message.data : {} };
      for (const listener of this.listeners) listener(event);
    } else if (typeof message.id === 'number') this.takeAnswer(message.id, message);
  }

  private takeAnswer(id: number, message: Readonly<Record<string, unknown>>): void {
    const question = this.questions.get(id);
    if (question === undefined) return;
    this.questions.delete(id);
    clearTimeout(question.timer);
    if ('return' in message) {
      question.resolve(message.return);
      return;
    }
    const error = isObject(message.error) ? message.error : {};
    const problem = typeof error.desc === 'string' ? error.desc : 'an answer without a result';
    question.reject(fail('VM_MONITOR', { id: this.id, command: question.command, problem }));
  }

  private refuse(problem: string): void {
    this.end(problem);
    this.socket.destroy();
  }

  private end(problem: string): void {
    this.broken ??= problem;
    this.parts = [];
    for (const { command, reject, timer } of this.questions.values()) {
      clearTimeout(timer);
      reject(fail('VM_MONITOR', { id: this.id, command, problem: this.broken }));
    }
    this.questions.clear();
  }
}

export function isObject(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
