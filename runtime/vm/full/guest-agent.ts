/**
 * The guest agent of QEMU (qemu-ga), where a machine's operating system has one: JSON over a port of virtio-serial. It is one conversation: a question, its
 * answer, the next. Answers have no numbers, so whoever connects first says a number of its own and drops all that comes before it is said back.
 *
 * What is in the guest can send what it wants: lines are bounded, and what makes no sense ends the conversation, not more.
 */
import { randomInt } from 'node:crypto';
import { connect, type Socket } from 'node:net';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';
import { isObject } from '../qemu/monitor.ts';

/** Name of its port, as every guest's agent looks for it. */
export const GUEST_AGENT_PORT = 'org.qemu.guest_agent.0';

/** Both streams of a command come in one line; the agent keeps 16 MiB of each. */
const MAX_LINE_BYTES = 48 << 20;
const ANSWER_MS = 60_000;
/** Of a guest's file systems. */
const FREEZE_MS = 20_000;
const THAW = 'guest-fsfreeze-thaw';
const DELIMITER = 0xff;
const NOTHING = Buffer.alloc(0);
const MOST_EARLY = 8;
const MAX_EARLY_BYTES = 4 << 10;

interface Waiting {
  readonly resolve: (line: string) => void;
  readonly reject: (error: Error) => void;
}

/** What the guest itself said no to. */
export class GuestRefusal extends Error {}

export class GuestAgent {
  private readonly path: string;
  private readonly id: string;
  private socket: Socket | undefined;
  /** A line that has begun: the first bytes of it. In one piece, which doubles: pieces of a byte each would be far larger than what they hold. */
  private begun = NOTHING;
  private begunBytes = 0;
  private waiting: Waiting | undefined;
  /** It finds its way back; only then may lines come that nobody waits for. */
  private greeting = false;
  /** Those: of a greeting there are two, at once or not. */
  private early: string[] = [];
  private turn: Promise<void> = Promise.resolve();

  /** @param id Of the machine, for errors. */
  constructor(path: string, id: string) {
    this.path = path;
    this.id = id;
  }

  /** @throws GuestRefusal, VM_GUEST_AGENT */
  ask(command: string, args?: object, { timeoutMs = ANSWER_MS } = {}): Promise<unknown> {
    return this.inTurn(() => this.askNow(command, args, timeoutMs));
  }

  /** The guest's file systems are at rest meanwhile, where it can do that. Whatever else is asked waits: it would be refused. */
  whileFrozen<T>(work: () => Promise<T>): Promise<T> {
    return this.inTurn(async () => {
      await this.askNow('guest-fsfreeze-freeze', undefined, FREEZE_MS).catch(() => {});
      try {
        return await work();
      } finally {
        await this.askNow(THAW, undefined, FREEZE_MS).catch(() => {});
      }
    });
  }

  /** Before whatever is asked from now on, which one that is frozen would refuse. Nobody waits for it. */
  thawIf(isThere: () => Promise<boolean>): void {
    this.inTurn(async () => {
      if (await isThere()) await this.askNow(THAW, undefined, FREEZE_MS);
    }).catch(() => {});
  }

  close(): void {
    this.end('it is closed');
  }

  private inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.turn.then(work);
    // Without its answer, which may be large.
    const ignore = () => {};
    this.turn = done.then(ignore, ignore);
    return done;
  }

  private async askNow(command: string, args: object | undefined, timeoutMs: number): Promise<unknown> {
    try {
      await this.open(timeoutMs);
      const line = await this.say(`${JSON.stringify({ execute: command, arguments: args })}\n`, timeoutMs);
      const answer: unknown = JSON.parse(line);
      if (isObject(answer) && 'return' in answer) return answer.return;
      const error = isObject(answer) && isObject(answer.error) ? answer.error : undefined;
      if (typeof error?.desc === 'string') throw new GuestRefusal(error.desc);
      throw new Error('an answer without a result');
    } catch (error) {
      if (error instanceof GuestRefusal) throw error;
      // Whatever comes later is the answer to another question.
      this.end(messageOf(error));
      throw fail('VM_GUEST_AGENT', { id: this.id, command, problem: messageOf(error) }, error);
    }
  }

  private async open(timeoutMs: number): Promise<void> {
    if (this.socket !== undefined) return;
    const socket = connect(this.path);
    await new Promise<void>((resolve, reject) => {
      socket.once('connect', resolve);
      socket.once('error', reject);
    });
    this.socket = socket;
    this.greeting = true;
    socket.on('data', (bytes: Buffer) => this.take(socket, bytes));
    socket.on('error', () => {});
    socket.once('close', () => {
      if (this.socket === socket) this.end('the connection is closed');
    });
    const number = randomInt(1, 2 ** 31);
    const hello = JSON.stringify({ execute: 'guest-sync-delimited', arguments: { id: number } });
    // The delimiter before it ends what somebody else may have begun to say.
    const until = performance.now() + timeoutMs;
    let line = await this.say(Buffer.concat([Buffer.from([DELIMITER]), Buffer.from(`${hello}\n`)]), timeoutMs);
    while (!isSaidBack(line, number)) {
      const leftMs = until - performance.now();
      if (leftMs <= 0) throw new Error('it does not find its way back');
      line = await this.say(undefined, leftMs);
    }
    this.greeting = false;
    this.early = [];
  }

  /** Resolves with the next line. */
  private say(bytes: Buffer | string | undefined, timeoutMs: number): Promise<string> {
    const [next] = this.early.splice(0, 1);
    if (next !== undefined) return Promise.resolve(next);
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(`no answer within ${Math.ceil(timeoutMs / 1000)} s`)), timeoutMs);
      const done = () => {
        clearTimeout(timer);
        this.waiting = undefined;
      };
      this.waiting = {
        resolve: (line) => {
          done();
          resolve(line);
        },
        reject: (error) => {
          done();
          reject(error);
        },
      };
      if (this.socket === undefined) return this.waiting.reject(new Error('the connection is closed'));
      if (bytes !== undefined) this.socket.write(bytes);
    });
  }

  private take(socket: Socket, bytes: Buffer): void {
    if (this.socket !== socket) return;
    let from = 0;
    for (let end = bytes.indexOf(10); end !== -1; end = bytes.indexOf(10, from)) {
      const line = Buffer.concat([this.begun.subarray(0, this.begunBytes), bytes.subarray(from, end)]);
      this.begun = NOTHING;
      this.begunBytes = 0;
      from = end + 1;
      const text = line.subarray(line.lastIndexOf(DELIMITER) + 1).toString('utf8');
      if (text.trim() === '') continue;
      if (this.waiting !== undefined) this.waiting.resolve(text);
      // Else it is the answer to no question.
      else if (this.greeting && this.early.length < MOST_EARLY && line.length <= MAX_EARLY_BYTES) this.early.push(text);
    }
    if (from < bytes.length) this.keep(bytes.subarray(from));
  }

  /** Of a line that has not ended. */
  private keep(bytes: Buffer): void {
    const size = this.begunBytes + bytes.length;
    const most = this.greeting || this.waiting !== undefined ? MAX_LINE_BYTES : MAX_EARLY_BYTES;
    if (size > most) {
      this.end(`a line of more than ${most} bytes`);
      return;
    }
    if (size > this.begun.length) {
      const larger = Buffer.allocUnsafe(Math.min(MAX_LINE_BYTES, Math.max(size, 2 * this.begun.length)));
      this.begun.copy(larger, 0, 0, this.begunBytes);
      this.begun = larger;
    }
    bytes.copy(this.begun, this.begunBytes);
    this.begunBytes = size;
  }

  private end(problem: string): void {
    const { socket, waiting } = this;
    this.socket = undefined;
    this.begun = NOTHING;
    this.begunBytes = 0;
    this.greeting = false;
    this.early = [];
    socket?.destroy();
    waiting?.reject(new Error(problem));
  }
}

function isSaidBack(line: string, number: number): boolean {
  try {
    const said: unknown = JSON.parse(line);
    return isObject(said) && said.return === number;
  } catch {
    return false;
  }
}

/** errno of what the guest's system said. */
export function errnoOf(refusal: string): number {
  const known: readonly [RegExp, number][] = [
    [/no such file|not found|cannot find/i, 2],
    [/permission denied|access is denied/i, 13],
    [/is a directory/i, 21],
    [/not a directory/i, 20],
    [/no space/i, 28],
    [/read-only file system/i, 30],
    [/exec format/i, 8],
  ];
  return known.find(([text]) => text.test(refusal))?.[1] ?? 5;
}
