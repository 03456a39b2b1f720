/**
 * Commands in a machine by its guest agent, as what an agent of ours would say of them (aether/agent-channel.ts): journal, output, readers and time-outs are
 * those of every sandbox. What this agent cannot do shows: input is given as a whole when it has ended, output comes when the command has, and a kill
 * is the guest's own `kill`, of its process.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { messageOf } from '#base';
import type { AgentChannel, CommandTrees } from '../../aether/agent-channel.ts';
import { WINDOW_BYTES } from '../../aether/kept-command.ts';
import { AGENT_FRAME, PayloadReader, PayloadWriter } from '../../backend/agent-wire.ts';
import { STAGE_EXEC } from '../../backend/launch-order.ts';
import { isObject } from '../qemu/monitor.ts';
import { errnoOf, type GuestAgent, GuestRefusal } from './guest-agent.ts';

export interface CommandsHost {
  /** Of the machine that runs now; undefined: it stands still. */
  agent(): GuestAgent | undefined;
  /** To the sandbox's link. */
  receive(kind: number, about: number, payload: Buffer): void;
  /** It has not begun, as far as anybody knows. */
  refuse(command: number, error: Error): void;
  /** Nobody will ever know how it ended. */
  lose(command: number, reason: string): void;
  readonly hasEnded: boolean;
}

interface Command {
  readonly args: readonly string[];
  readonly input: Buffer[] | undefined;
  inputBytes: number;
  begun: boolean;
  pid: number | undefined;
  readonly output: Record<1 | 2, { bytes: Buffer; sent: number; limit: number }>;
  isOver: boolean;
}

const SIGKILL = 9;
const FLAG_STDIN = 2;
const EFBIG = 27;
const ENOENT = 2;
/** One message has all of it. */
const MAX_INPUT_BYTES = 8 << 20;
const PART_BYTES = 64 << 10;
const FIRST_LOOK_MS = 20;
const LAST_LOOK_MS = 500;
/** Of looks that failed while the machine ran. */
const MOST_FAILURES = 20;
const STREAMS = [1, 2] as const;
const NOTHING = Buffer.alloc(0);

export class MachineCommands implements AgentChannel {
  private host: CommandsHost | undefined;
  private readonly all = new Map<number, Command>();

  /** Before anything is asked of it. */
  attach(host: CommandsHost): void {
    this.host = host;
  }

  readonly trees: CommandTrees = {
    groupOf: () => undefined,
    killAll: (command) => this.kill(command, SIGKILL),
    killOthers: async () => {},
    remove: () => {},
    outOfMemoryCount: () => 0,
    thaw() {},
  };

  cancel(): void {}

  toAgent(kind: number, about: number, payload: Buffer = Buffer.alloc(0)): void {
    const reader = new PayloadReader(payload);
    switch (kind) {
      case AGENT_FRAME.exec:
        this.take(about, reader);
        break;
      case AGENT_FRAME.stdin:
        this.feed(about, reader.rest());
        break;
      case AGENT_FRAME.stdinClose: {
        const command = this.all.get(about);
        if (command?.input !== undefined && !command.isOver) this.run(about, command);
        break;
      }
      case AGENT_FRAME.kill:
        void this.kill(about, reader.u32());
        break;
      case AGENT_FRAME.credit: {
        const [stream, limit] = [reader.u8() === 2 ? 2 : 1, Number(reader.u64())] as const;
        const output = this.all.get(about)?.output[stream];
        if (output !== undefined) output.limit = Math.max(output.limit, limit);
        this.flush(about);
        break;
      }
      case AGENT_FRAME.drop:
        this.forget(about);
        break;
      case AGENT_FRAME.which:
        // Those of this process: one before it took what it knew with it.
        this.tell(AGENT_FRAME.these, about, new PayloadWriter().u32(0).done());
        break;
      case AGENT_FRAME.file:
        // Its accounts: the guest's own business.
        this.tell(AGENT_FRAME.fileFailed, about, new PayloadWriter().u32(ENOENT).done());
        break;
      default:
    }
  }

  private take(id: number, reader: PayloadReader): void {
    const flags = reader.u8();
    reader.u16();
    reader.u16();
    reader.bytes();
    const args = reader.list(() => reader.bytes().toString('utf8'));
    const output = () => ({ bytes: NOTHING, sent: 0, limit: WINDOW_BYTES });
    const command: Command = {
      args,
      input: (flags & FLAG_STDIN) === 0 ? undefined : [],
      inputBytes: 0,
      begun: false,
      pid: undefined,
      output: { 1: output(), 2: output() },
      isOver: false,
    };
    this.all.set(id, command);
    // It begins when its input has ended; whoever is to write that has to know that it may.
    if (command.input !== undefined) this.tell(AGENT_FRAME.runs, id, new PayloadWriter().u32(0).done());
    else this.run(id, command);
  }

  private feed(id: number, bytes: Buffer): void {
    const command = this.all.get(id);
    if (command?.input === undefined || command.isOver) return;
    command.inputBytes += bytes.length;
    if (command.inputBytes > MAX_INPUT_BYTES) {
      this.refuse(id, EFBIG);
      return;
    }
    command.input.push(Buffer.from(bytes));
    this.tell(AGENT_FRAME.stdinTaken, id, new PayloadWriter().u32(bytes.length).done());
  }

  private run(id: number, command: Command): void {
    // Whatever is wrong with what the guest says: it costs this command, and no more.
    this.begin(id, command).catch((error) => this.lose(id, messageOf(error)));
  }

  private async begin(id: number, command: Command): Promise<void> {
    if (command.begun) return;
    command.begun = true;
    let pid: number;
    try {
      pid = await this.start(command);
    } catch (error) {
      if (error instanceof GuestRefusal) return this.refuse(id, errnoOf(error.message));
      this.forget(id);
      return this.host!.refuse(id, error as Error);
    }
    command.pid = pid;
    if (command.input === undefined) this.tell(AGENT_FRAME.runs, id, new PayloadWriter().u32(pid).done());
    await this.follow(id, command, pid);
  }

  /** Its number in the guest. Of its input nothing stays here. */
  private async start({ args: [path, ...arg], input }: Command): Promise<number> {
    const data = input === undefined ? {} : { 'input-data': Buffer.concat(input.splice(0)).toString('base64') };
    const answer = await this.agentNow().ask('guest-exec', { path, arg, 'capture-output': true, ...data });
    const pid = isObject(answer) ? answer.pid : undefined;
    if (typeof pid !== 'number' || !Number.isInteger(pid) || pid <= 0 || pid >= 2 ** 32) {
      throw new Error('an answer without a process');
    }
    return pid;
  }

  /** Its number is the guest's: it stays what it is while the machine is paused and resumed. */
  private async follow(id: number, command: Command, pid: number): Promise<void> {
    let failures = 0;
    for (let pause = FIRST_LOOK_MS; ; pause = Math.min(LAST_LOOK_MS, pause * 1.5)) {
      await delay(pause);
      if (this.host!.hasEnded || this.all.get(id) !== command) return;
      const agent = this.host!.agent();
      if (agent === undefined) continue;
      try {
        const status = await agent.ask('guest-exec-status', { pid });
        failures = 0;
        if (isObject(status) && status.exited === true) return this.finish(id, command, status);
      } catch (error) {
        if (this.host!.agent() === undefined) continue;
        if (error instanceof GuestRefusal || ++failures >= MOST_FAILURES) {
          return this.lose(id, 'the guest agent does not know what became of it');
        }
      }
    }
  }

  private finish(id: number, command: Command, status: Readonly<Record<string, unknown>>): void {
    command.isOver = true;
    const bytes = (name: string) => {
      const text = status[name];
      return typeof text === 'string' ? Buffer.from(text, 'base64') : NOTHING;
    };
    command.output[1].bytes = bytes('out-data');
    command.output[2].bytes = bytes('err-data');
    const number = (name: string) => (typeof status[name] === 'number' ? (status[name] as number) : 0);
    const ended = number('signal') === 0 ? (number('exitcode') & 0xff) << 8 : number('signal') & 0x7f;
    const out = new PayloadWriter().u32(ended);
    for (const stream of STREAMS) out.u64(BigInt(command.output[stream].bytes.length));
    this.tell(AGENT_FRAME.exited, id, out.done());
    this.flush(id);
  }

  /** As far as may be sent. */
  private flush(id: number): void {
    const command = this.all.get(id);
    if (command === undefined || !command.isOver) return;
    for (const stream of STREAMS) {
      const output = command.output[stream];
      const { bytes } = output;
      while (output.sent < Math.min(bytes.length, output.limit)) {
        const part = bytes.subarray(output.sent, Math.min(output.sent + PART_BYTES, output.limit));
        const head = new PayloadWriter().u8(stream).u64(BigInt(output.sent)).done();
        output.sent += part.length;
        this.tell(AGENT_FRAME.data, id, Buffer.concat([head, part]));
      }
      if (output.sent < bytes.length || output.limit === Number.POSITIVE_INFINITY) continue;
      output.limit = Number.POSITIVE_INFINITY;
      output.bytes = NOTHING;
      this.tell(AGENT_FRAME.endOfStream, id, new PayloadWriter().u8(stream).done());
    }
    // All is said, and kept by the sandbox.
    if (STREAMS.every((stream) => command.output[stream].limit === Number.POSITIVE_INFINITY)) this.forget(id);
  }

  private refuse(id: number, errno: number): void {
    this.forget(id);
    this.tell(AGENT_FRAME.refused, id, new PayloadWriter().u8(STAGE_EXEC).u32(errno).done());
  }

  private lose(id: number, reason: string): void {
    this.forget(id);
    this.host!.lose(id, reason);
  }

  /** It is over: what it said and was given is freed. */
  private forget(id: number): void {
    const command = this.all.get(id);
    if (command !== undefined) command.isOver = true;
    this.all.delete(id);
  }

  private async kill(id: number, signal: number): Promise<void> {
    const command = this.all.get(id);
    if (command === undefined || command.isOver) return;
    if (command.pid === undefined) {
      // It waits for its input, and has not begun.
      if (!command.begun) this.finish(id, command, { exited: true, signal });
      return;
    }
    for (const target of [`-${command.pid}`, String(command.pid)]) {
      await this.host!.agent()
        ?.ask('guest-exec', { path: 'kill', arg: [`-${signal}`, '--', target] })
        .catch(() => {});
    }
  }

  private agentNow(): GuestAgent {
    const agent = this.host!.agent();
    if (agent === undefined) throw new Error('its machine stands still');
    return agent;
  }

  private tell(kind: number, about: number, payload: Buffer): void {
    this.host?.receive(kind, about, payload);
  }
}
