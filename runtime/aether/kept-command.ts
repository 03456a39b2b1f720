/**
 * A command of a sandbox that stays, as this process sees it: its output goes to disk as it comes, readers read from there. What the
 * agent may send is said as an offset for each stream (`limit`), so that a process that comes later knows it from what is on disk.
 */
import { constants } from 'node:os';
import { join } from 'node:path';
import { messageOf, systemCode } from '#base';
import { AGENT_FRAME, PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { signalNumber } from '../backend/signal-effect.ts';
import { fail } from '../errors.ts';
import type { ExecHandle, ExecResult, OutputFrom, OutputPart, StreamName } from '../sandbox-api/exec.ts';
import { type CommandJournal, type CommandRecord, commandFolder } from './command-journal.ts';
import { OutputSpool, SPOOL_LIMITS, type SpoolLimits } from './output-spool.ts';

/** How much of a stream the agent may send ahead. */
export const WINDOW_BYTES = 256 << 10;
const GRANT_BYTES = WINDOW_BYTES / 4;
const READ_BYTES = 64 << 10;
const KILL_AGAIN_MS = 500;
const WRITE_AGAIN_MS = 1_000;
const PATIENCE_WHEN_FULL_MS = 20_000;
const STDIN_PART_BYTES = 32 << 10;
const STDIN_AHEAD_BYTES = 128 << 10;

/** What a command needs of its sandbox. */
export interface CommandHost {
  readonly name: string;
  readonly commands: string;
  readonly journal: CommandJournal;
  send(kind: number, about: number, payload?: Buffer): void;
  /** SIGKILL to all of it. */
  killTree(id: number): Promise<void>;
  /** Memory ran out since the last time it was asked. */
  ranOutOfMemory(): boolean;
  /** How long the sandbox has stood still in its life: a command's time does not go on meanwhile. */
  stoodMs(): number;
  /** It has ended. */
  over(command: KeptCommand): void;
}

interface Reader {
  readonly at: Record<StreamName, number>;
}

interface Unwritten {
  readonly stream: StreamName;
  readonly offset: number;
  readonly bytes: Buffer;
}

interface Exit {
  readonly status: number;
  /** Undefined: the stream has ended. */
  readonly stdout: number | undefined;
  readonly stderr: number | undefined;
}

export interface Mark {
  readonly bytes: Buffer;
  readonly stdout: number | undefined;
  readonly stderr: number | undefined;
}

const NAMES: readonly StreamName[] = ['stdout', 'stderr'];
const NUMBERS: Readonly<Record<StreamName, number>> = { stdout: 1, stderr: 2 };

export class KeptCommand implements ExecHandle {
  readonly id: number;
  /** Of a session: each mark, and undefined when there will be no more. */
  onMark: ((mark: Mark | undefined) => void) | undefined;
  /** Inside the sandbox; unknown of one that ran before this process did. */
  pid: number | undefined;
  private state: CommandRecord;
  private readonly host: CommandHost;
  private readonly spools: Readonly<Record<StreamName, OutputSpool>>;
  private readonly spoolLimits: SpoolLimits;
  private readonly limits: Record<StreamName, number>;
  private readonly readers = new Set<Reader>();
  private readonly watchers = new Set<() => void>();
  private exit: Exit | undefined;
  /** Streams that nobody inside has open any more. */
  private readonly whole = new Set<StreamName>();
  private readonly unwritten: Unwritten[] = [];
  private retry: NodeJS.Timeout | undefined;
  private fullSinceMs: number | undefined;
  private resumed = false;
  private problem: Error | undefined;
  private isKilling = false;
  private timer: NodeJS.Timeout | undefined;
  private timedOut = false;
  private stdinAhead = 0;
  private stdinOpen = true;
  private started: { resolve(): void; reject(error: Error): void } | undefined;
  private hasStarted = false;

  constructor(host: CommandHost, record: CommandRecord, spoolLimits: SpoolLimits = SPOOL_LIMITS) {
    this.host = host;
    this.state = record;
    this.id = record.id;
    this.spoolLimits = spoolLimits;
    const folder = commandFolder(host.commands, record.id);
    const spool = (name: StreamName) => new OutputSpool(join(folder, name), spoolLimits);
    this.spools = { stdout: spool('stdout'), stderr: spool('stderr') };
    this.limits = { stdout: WINDOW_BYTES, stderr: WINDOW_BYTES };
    if (record.lost !== undefined)
      this.problem = fail('RUNTIME_SANDBOX_GONE', { name: host.name, reason: record.lost });
  }

  get record(): CommandRecord {
    return this.state;
  }
  get result(): ExecResult | undefined {
    return this.state.result;
  }
  get isOver(): boolean {
    return this.state.result !== undefined || this.problem !== undefined;
  }

  /** Somebody reads along. */
  get isFollowed(): boolean {
    return this.readers.size > 0;
  }
  /** It was not started to be left alone, and is no session, which idles. */
  get isForeground(): boolean {
    return this.state.background !== true && !this.state.session;
  }

  /** Resolves when it runs; for whoever started it. */
  whenStarted(): Promise<void> {
    if (this.hasStarted || this.isOver) return Promise.resolve();
    return new Promise((resolve, reject) => {
      this.started = { resolve, reject };
    });
  }

  /** Of a command that ran before this process did. */
  resume(): void {
    this.hasStarted = true;
    this.resumed = true;
    for (const name of NAMES) this.grant(name, true);
    this.armTimer();
  }

  async write(bytes: Buffer): Promise<void> {
    for (let at = 0; at < bytes.length && this.stdinOpen && !this.isOver; at += STDIN_PART_BYTES) {
      const part = bytes.subarray(at, at + STDIN_PART_BYTES);
      while (this.stdinAhead >= STDIN_AHEAD_BYTES && this.stdinOpen && !this.isOver) await this.change();
      if (!this.stdinOpen || this.isOver) return;
      this.stdinAhead += part.length;
      this.host.send(AGENT_FRAME.stdin, this.id, part);
    }
  }

  async closeStdin(): Promise<void> {
    if (!this.isOver) this.host.send(AGENT_FRAME.stdinClose, this.id);
  }

  resize(rows: number, columns: number): void {
    if (!this.isOver) this.host.send(AGENT_FRAME.resize, this.id, new PayloadWriter().u16(rows).u16(columns).done());
  }

  kill(signal: NodeJS.Signals): void {
    if (!this.isOver)
      this.host.send(AGENT_FRAME.kill, this.id, new PayloadWriter().u32(signalNumber(signal)).u8(0).done());
  }

  killTree(): Promise<void> {
    return this.host.killTree(this.id);
  }

  async wait(): Promise<ExecResult> {
    for (;;) {
      if (this.state.result !== undefined) return this.state.result;
      if (this.problem !== undefined) throw this.problem;
      await this.change();
    }
  }

  async *output({ stdout = 0, stderr = 0, follow = true, signal }: OutputFrom = {}): AsyncGenerator<OutputPart> {
    const reader: Reader = { at: { stdout, stderr } };
    if (follow) this.readers.add(reader);
    try {
      for (;;) {
        signal?.throwIfAborted();
        let found = false;
        for (const stream of NAMES) {
          const offset = reader.at[stream];
          const part = this.spools[stream].read(offset, READ_BYTES);
          if (part === undefined) continue;
          found = true;
          if (part.bytes === undefined) {
            yield { stream, offset, missingBytes: part.missing };
            reader.at[stream] += part.missing;
          } else {
            yield { stream, offset, bytes: part.bytes };
            reader.at[stream] += part.bytes.length;
          }
          this.grant(stream);
        }
        if (found) continue;
        if (!follow || this.isOver) return;
        await this.change(signal);
      }
    } finally {
      this.readers.delete(reader);
      for (const name of NAMES) this.grant(name);
      this.rest();
    }
  }

  total(stream: StreamName): number {
    return this.spools[stream].total;
  }

  /** @throws RUNTIME_AGENT_PROTOCOL */
  receive(kind: number, payload: Buffer): void {
    const reader = new PayloadReader(payload);
    switch (kind) {
      case AGENT_FRAME.runs:
        this.hasStarted = true;
        this.pid = reader.u32();
        this.started?.resolve();
        this.armTimer();
        return;
      case AGENT_FRAME.data: {
        const stream = reader.u8() === 2 ? 'stderr' : 'stdout';
        const offset = Number(reader.u64());
        this.store({ stream, offset, bytes: reader.rest() });
        // Of a child that was left behind.
        this.rest();
        break;
      }
      case AGENT_FRAME.exited:
        this.exit = { status: reader.i32(), stdout: total(reader.u64()), stderr: total(reader.u64()) };
        break;
      case AGENT_FRAME.endOfStream:
        this.whole.add(reader.u8() === 2 ? 'stderr' : 'stdout');
        break;
      case AGENT_FRAME.stdinTaken:
        this.stdinAhead = Math.max(0, this.stdinAhead - reader.u32());
        break;
      case AGENT_FRAME.stdinGone:
        this.stdinOpen = false;
        break;
      case AGENT_FRAME.mark: {
        const [stdout, stderr] = [total(reader.u64()), total(reader.u64())];
        const bytes = reader.rest();
        this.onMark?.(bytes.length === 0 ? undefined : { bytes, stdout, stderr });
        break;
      }
      default:
        throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of type ${kind} about a command` });
    }
    this.finishIfWhole();
    this.notify();
  }

  /** It never ran. */
  refuse(error: Error): void {
    this.problem = error;
    this.started?.reject(error);
    this.close();
  }

  /** The sandbox has gone, or nobody knows what became of it. */
  lose(error: Error, reason: string): void {
    if (this.isOver) return;
    this.problem = error;
    this.state = { ...this.state, lost: reason };
    this.note();
    this.started?.reject(error);
    this.close();
  }

  /** Resolves at the next news of it. */
  change(signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      const done = () => {
        this.watchers.delete(done);
        signal?.removeEventListener('abort', aborted);
        resolve();
      };
      const aborted = () => {
        this.watchers.delete(done);
        reject(signal?.reason);
      };
      this.watchers.add(done);
      signal?.addEventListener('abort', aborted, { once: true });
    });
  }

  /** When nothing more will be written or read: of commands long over. */
  dispose(): void {
    clearTimeout(this.timer);
    clearTimeout(this.retry);
    for (const spool of Object.values(this.spools)) spool.close();
  }

  private close(): void {
    clearTimeout(this.timer);
    this.onMark?.(undefined);
    this.notify();
    this.rest();
  }

  /** Of a command that is over, and that nobody reads, no file is held open. */
  private rest(): void {
    if (this.isOver && this.readers.size === 0) for (const name of NAMES) this.spools[name].close();
  }

  private notify(): void {
    for (const watcher of [...this.watchers]) watcher();
  }

  private armTimer(): void {
    const leftMs = this.leftMs();
    if (leftMs === undefined || this.isOver || this.timer !== undefined) return;
    // setTimeout takes no more than 24 days.
    this.timer = setTimeout(() => this.expire(), Math.min(Math.max(1, leftMs), 2 ** 31 - 1));
    this.timer.unref();
  }

  private leftMs(): number | undefined {
    const { deadlineMs } = this.state;
    return deadlineMs === undefined ? undefined : deadlineMs + this.host.stoodMs() - Date.now();
  }

  private expire(): void {
    this.timer = undefined;
    if (this.isOver) return;
    if ((this.leftMs() ?? 0) > 0) {
      this.armTimer();
      return;
    }
    // One that has exited waits for its output, which what it left behind may have taken.
    if (this.exit === undefined) this.timedOut = true;
    // Again, should the machine have been too busy to let it die.
    this.isKilling = true;
    this.killTree()
      .catch(() => {})
      .finally(() => {
        this.isKilling = false;
        this.finishIfWhole();
        if (this.isOver) return;
        this.timer = setTimeout(() => this.expire(), KILL_AGAIN_MS);
        this.timer.unref();
      });
  }

  private finishIfWhole(): void {
    const { exit } = this;
    // That it has ended by its time-out is said when all that it started has.
    if (exit === undefined || this.isOver || this.isKilling) return;
    // What lay in its pipe another process inside may have taken out of it.
    const isWhole = (name: StreamName) => this.whole.has(name) || this.spools[name].total >= (exit[name] ?? 0);
    if (this.unwritten.length > 0 || !NAMES.every(isWhole)) return;
    const number = exit.status & 0x7f;
    const killed = number === constants.signals.SIGKILL;
    this.state = {
      ...this.state,
      result: {
        exitCode: number === 0 ? (exit.status >> 8) & 0xff : 128 + number,
        signal: number === 0 ? undefined : signalNamed(number),
        timedOut: this.timedOut && killed,
        outOfMemory: killed && this.host.ranOutOfMemory(),
        stdoutBytes: this.bytesOf('stdout', exit),
        stderrBytes: this.bytesOf('stderr', exit),
        durationMs: Date.now() - this.state.startedMs,
      },
    };
    this.note();
    this.close();
    this.host.over(this);
  }

  /** On a full disk it waits for room, and with it whoever writes: no more is granted meanwhile. */
  private store(part: Unwritten): void {
    if (this.problem !== undefined) return;
    const before = this.unwritten.filter(({ stream }) => stream === part.stream).at(-1);
    const received = before === undefined ? this.spools[part.stream].total : before.offset + before.bytes.length;
    if (part.offset > received) {
      if (!this.resumed) throw fail('RUNTIME_AGENT_PROTOCOL', { problem: 'output with a hole' });
      const reason = 'the disk was full when the runtime service was restarted, and output of it was lost';
      this.lose(fail('RUNTIME_SANDBOX_GONE', { name: `${this.host.name}, command ${this.id},`, reason }), reason);
      return;
    }
    this.unwritten.push(part);
    this.writeOut();
  }

  private writeOut(): void {
    while (this.unwritten.length > 0) {
      const { stream, offset, bytes } = this.unwritten[0]!;
      try {
        this.spools[stream].write(offset, bytes);
      } catch (error) {
        // Of the disk: no fault of the sandbox's.
        if (systemCode(error) === undefined) throw error;
        this.waitForRoom(messageOf(error));
        return;
      }
      this.unwritten.shift();
      this.fullSinceMs = undefined;
      this.grant(stream);
    }
  }

  private waitForRoom(problem: string): void {
    this.fullSinceMs ??= Date.now();
    if (Date.now() - this.fullSinceMs > PATIENCE_WHEN_FULL_MS) {
      const reason = `its output cannot be kept in ${this.host.commands}: ${problem}`;
      this.lose(fail('RUNTIME_SANDBOX_GONE', { name: `${this.host.name}, command ${this.id},`, reason }), reason);
      this.killTree().catch(() => {});
      return;
    }
    this.retry ??= setTimeout(() => {
      this.retry = undefined;
      try {
        this.writeOut();
      } catch (error) {
        this.lose(error as Error, messageOf(error));
      }
      this.finishIfWhole();
      this.notify();
      this.rest();
    }, WRITE_AGAIN_MS).unref();
  }

  /** Without room for it, how it ended is known as long as this process lives. */
  private note(): void {
    try {
      this.host.journal.end(this.state);
    } catch {
      // See above.
    }
  }

  /** Until it ended. */
  private bytesOf(stream: StreamName, exit: Exit): number {
    const { total: have } = this.spools[stream];
    return Math.min(exit[stream] ?? have, have);
  }

  /** Says how far the agent may go: never so far that a reader loses what it has not read. */
  private grant(stream: StreamName, again = false): void {
    const { headBytes, tailBytes } = this.spoolLimits;
    const { total: have } = this.spools[stream];
    const slowest = Math.min(...[...this.readers].map((reader) => reader.at[stream]));
    const held = Number.isFinite(slowest) ? Math.max(headBytes + tailBytes, slowest + tailBytes) : Infinity;
    const limit = Math.min(have + WINDOW_BYTES, held);
    const more = limit - this.limits[stream];
    if (!again && more < GRANT_BYTES && !(more > 0 && have === this.limits[stream])) return;
    this.limits[stream] = Math.max(limit, this.limits[stream]);
    this.host.send(AGENT_FRAME.credit, this.id, new PayloadWriter().u8(NUMBERS[stream]).u64(BigInt(limit)).done());
  }
}

const ALL = 0xffff_ffff_ffff_ffffn;

function total(value: bigint): number | undefined {
  return value === ALL ? undefined : Number(value);
}

function signalNamed(number: number): NodeJS.Signals | undefined {
  return SIGNALS.get(number);
}

const SIGNALS: ReadonlyMap<number, NodeJS.Signals> = new Map(
  Object.entries(constants.signals)
    .reverse()
    .map(([name, number]) => [number, name as NodeJS.Signals]),
);
