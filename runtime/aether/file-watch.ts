/** A watch of files by the agent (runtime/agent/src/watches.rs): events as they are read, so many ahead and no more. */
import { constants } from 'node:os';
import { getSystemErrorMap } from 'node:util';
import { AGENT_FRAME, PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { fail } from '../errors.ts';
import { FILE_EVENTS, type FileEvent, type FileWatch, type WatchOptions } from '../sandbox-api/watch.ts';
import type { AgentStream, AgentStreams } from './agent-streams.ts';

/** Of events that are here and not read, as they came. */
const WINDOW_BYTES = 256 << 10;
const { ECANCELED } = constants.errno;

/** Resolves when every event from now on will be told. @throws RUNTIME_FILE, RUNTIME_WATCH_LIMIT, RUNTIME_SANDBOX_GONE */
export async function watchFiles(
  streams: AgentStreams,
  path: Buffer,
  { recursive = false, signal }: WatchOptions = {},
): Promise<FileWatch> {
  signal?.throwIfAborted();
  if (path.length === 0 || path.includes(0)) {
    const reason = 'a path has at least one byte, and none that is NUL';
    throw fail('RUNTIME_FILE', { path: path.toString(), code: 'EINVAL', reason });
  }
  const watch = new AgentWatch(streams, path, recursive);
  const aborted = () => watch.fail(signal?.reason as Error);
  signal?.addEventListener('abort', aborted, { once: true });
  try {
    await watch.begun;
  } catch (error) {
    signal?.removeEventListener('abort', aborted);
    watch.close();
    throw error;
  }
  return watch;
}

interface Batch {
  readonly events: readonly FileEvent[];
  readonly bytes: number;
}

class AgentWatch implements FileWatch, AgentStream {
  readonly begun: Promise<void>;
  private readonly streams: AgentStreams;
  private readonly path: Buffer;
  private readonly id: number;
  private settle!: { resolve(): void; reject(error: Error): void };
  private readonly batches: Batch[] = [];
  private read = 0;
  private isOver = false;
  private problem: Error | undefined;
  private wake: (() => void) | undefined;

  constructor(streams: AgentStreams, path: Buffer, recursive: boolean) {
    this.streams = streams;
    this.path = path;
    this.begun = new Promise((resolve, reject) => {
      this.settle = { resolve, reject };
    });
    this.begun.catch(() => {});
    this.id = streams.add(this);
    const order = new PayloadWriter()
      .bytes(path)
      .u8(recursive ? 1 : 0)
      .u32(WINDOW_BYTES);
    streams.send(AGENT_FRAME.watch, this.id, order.done());
  }

  onFrame(kind: number, reader: PayloadReader): void {
    if (kind === AGENT_FRAME.watches) {
      this.settle.resolve();
      return;
    }
    if (kind !== AGENT_FRAME.events)
      throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of type ${kind} about a watch` });
    const payload = Buffer.from(reader.rest());
    this.batches.push({ events: eventsOf(payload), bytes: payload.length });
    this.wake?.();
  }

  onClosed(errno: number): void {
    this.isOver = true;
    if (errno !== 0) this.fail(problemOf(this.path, errno));
    // Of one that had begun this says nothing new.
    this.settle.reject(problemOf(this.path, ECANCELED));
    this.wake?.();
  }

  onLost(error: Error): void {
    this.fail(error);
  }

  fail(error: Error): void {
    this.problem ??= error;
    this.settle.reject(error);
    this.close();
  }

  close(): void {
    this.isOver = true;
    this.streams.close(this.id);
    this.wake?.();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<FileEvent> {
    try {
      for (;;) {
        const batch = this.batches.shift();
        if (batch !== undefined) {
          yield* batch.events;
          this.read += batch.bytes;
          const limit = new PayloadWriter().u64(BigInt(this.read + WINDOW_BYTES)).done();
          if (!this.isOver) this.streams.send(AGENT_FRAME.take, this.id, limit);
          continue;
        }
        if (this.problem !== undefined) throw this.problem;
        if (this.isOver) return;
        await new Promise<void>((resolve) => {
          this.wake = resolve;
        });
        this.wake = undefined;
      }
    } finally {
      this.close();
    }
  }
}

/** @throws RUNTIME_AGENT_PROTOCOL */
function eventsOf(payload: Buffer): FileEvent[] {
  const reader = new PayloadReader(payload);
  const events: FileEvent[] = [];
  while (!reader.isAtEnd) {
    const event = FILE_EVENTS[reader.u8() - 1];
    if (event === undefined) throw fail('RUNTIME_AGENT_PROTOCOL', { problem: 'an unknown event of a file' });
    const [directory, cookie, path] = [reader.u8() !== 0, reader.u32(), reader.bytes()];
    events.push({ event, path, directory, cookie: cookie === 0 ? undefined : cookie });
  }
  return events;
}

function problemOf(path: Buffer, errno: number): Error {
  const [code, text] = getSystemErrorMap().get(-errno) ?? [`errno ${errno}`, `error ${errno}`];
  if (code === 'EMFILE' || code === 'ENOSPC') return fail('RUNTIME_WATCH_LIMIT', { path: path.toString(), code });
  return fail('RUNTIME_FILE', { path: path.toString(), code, reason: text });
}
