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
const DELIMITER = 0xff;
const MOST_EARLY = 8;

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
  private parts: Buffer[] = [];
  private partBytes = 0;
  private waiting: Waiting | undefined;
  /** That came while nobody waited: of a greeting there are two, at once or not. */
  private early: string[] = [];
  private turn: Promise<unknown> = Promise.resolve();

  /** @param id Of the machine, for errors. */
  constructor(path: string, id: string) {
    this.path = path;
    this.id = id;
  }

  /** @throws GuestRefusal, VM_GUEST_AGENT */
  ask(command: string, args?: object, { timeoutMs = ANSWER_MS } = {}): Promise<unknown> {
    const asked = this.turn.then(() => this.askNow(command, args, timeoutMs));
    this.turn = asked.catch(() => {});
    return asked;
  }

  close(): void {
    this.end('it is closed');
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
  }

  /** Resolves with the next line. */
  private say(bytes: Buffer | string | undefined, timeoutMs: number): Promise<string> {
    // What came before a question is the answer to none.
    if (bytes !== undefined) this.early = [];
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
      const line = Buffer.concat([...this.parts, bytes.subarray(from, end)]);
      this.parts = [];
      this.partBytes = 0;
      from = end + 1;
      const text = line.subarray(line.lastIndexOf(DELIMITER) + 1).toString('utf8');
      if (text.trim() === '') continue;
      if (this.waiting !== undefined) this.waiting.resolve(text);
      else if (this.early.length < MOST_EARLY) this.early.push(text);
    }
    if (from === bytes.length) return;
    this.parts.push(bytes.subarray(from));
    this.partBytes += bytes.length - from;
    if (this.partBytes > MAX_LINE_BYTES) this.end(`a line of more than ${MAX_LINE_BYTES} bytes`);
  }

  private end(problem: string): void {
    const { socket, waiting } = this;
    this.socket = undefined;
    this.parts = [];
    this.partBytes = 0;
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
