/**
 * chronus: a shell session, one shell of the sandbox that is fed command after command. Each goes to it over a descriptor of its own, as
 * one quoted word for `eval`, so that no quote, heredoc or comment reaches beyond its command; the end of each is told over another
 * descriptor, which commands do not have, with the exit status and a token. How much was written until then the agent tells.
 *
 * A command that takes the shell with it ends the session, and that is said. One that hangs is interrupted, then what it runs is killed,
 * then the shell.
 */
import { randomBytes } from 'node:crypto';
import { setTimeout as delay } from 'node:timers/promises';
import { AGENT_FRAME } from '../backend/agent-wire.ts';
import { fail } from '../errors.ts';
import type { OutputFrom, OutputPart, StreamName } from '../sandbox-api/exec.ts';
import type { ShellOptions, ShellResult, ShellSession } from '../sandbox-api/shell.ts';
import type { AgentLink } from './agent-link.ts';
import type { KeptCommand, Mark } from './kept-command.ts';

/** The shell reads its commands from standard input; what commands read is descriptor 9, what ends are told over is 4. */
const START = 'exec 9<&0 0<&3 3<&-';
const CAPTURE_BYTES = 4 << 20;
/** Between interrupt, kill and end. */
const PATIENCE_MS = 2_000;

interface Running {
  readonly token: string;
  done(status: number, mark: Mark): void;
}

/** What a pattern is looked for in. */
const EXPECT_BYTES = 128 * 1024;

export class OwnShell implements ShellSession {
  private readonly link: AgentLink;
  private readonly command: KeptCommand;
  private readonly terminal: boolean;
  private running: Running | undefined;
  private queue: Promise<unknown> = Promise.resolve();
  private text = '';
  private at: Record<StreamName, number> = { stdout: 0, stderr: 0 };
  private lostReason: string | undefined;
  private readonly losing: Promise<void>;
  private noteLost!: () => void;

  private constructor(link: AgentLink, command: KeptCommand, terminal: boolean) {
    this.link = link;
    this.command = command;
    this.terminal = terminal;
    this.losing = new Promise((resolve) => {
      this.noteLost = resolve;
    });
    command.onMark = (mark) => this.marked(mark);
    command.wait().then(
      ({ exitCode, signal }) =>
        this.lose(signal === undefined ? `it exited with ${exitCode}` : `it was ended by ${signal}`),
      (error: Error) => this.lose(error.message),
    );
  }

  static async open(link: AgentLink, options: ShellOptions): Promise<OwnShell> {
    const { shell, env, cwd, user, terminal } = options;
    const start =
      shell === undefined
        ? `${START}; command -v bash >/dev/null 2>&1 && exec bash -s; exec sh -s`
        : `${START}; exec ${quoted(shell)} -s`;
    const args = ['sh', '-c', start];
    const command = await link.start({
      args,
      env,
      cwd,
      user,
      terminal,
      stdin: terminal !== undefined,
      script: true,
      silent: true,
    });
    const session = new OwnShell(link, command, terminal !== undefined);
    // An interrupt is for what runs in it. Whoever is started by it has the default again.
    session.feed('trap : INT\n');
    // Before that an interrupt would end it.
    const { lost, stderr } = await session.run(':');
    if (lost)
      throw fail('RUNTIME_SHELL_LOST', {
        reason: `${session.lostReason}; it wrote: ${stderr.toString().slice(0, 500)}`,
      });
    return session;
  }

  get id(): number {
    return this.command.id;
  }
  /** It does something for somebody. */
  get isBusy(): boolean {
    return this.running !== undefined;
  }
  get lost(): boolean {
    return this.lostReason !== undefined;
  }

  run(command: string, options: { readonly timeoutMs?: number } = {}): Promise<ShellResult> {
    const result = this.queue.then(() => this.runNow(command, options.timeoutMs));
    this.queue = result.catch(() => {});
    return result;
  }

  write(bytes: Buffer): Promise<void> {
    return this.command.write(bytes);
  }

  interrupt(): void {
    if (this.terminal) void this.command.write(Buffer.from([3]));
    else this.command.kill('SIGINT');
  }

  resize(rows: number, columns: number): void {
    this.command.resize(rows, columns);
  }

  output(from?: OutputFrom): AsyncIterable<OutputPart> {
    return this.command.output(from);
  }

  async expect(
    pattern: RegExp | string,
    { timeoutMs = 30_000, from = 0 }: { readonly timeoutMs?: number; readonly from?: number } = {},
  ): Promise<Buffer> {
    const stop = AbortSignal.timeout(timeoutMs);
    let all = Buffer.alloc(0);
    try {
      for await (const part of this.command.output({ stdout: from, stderr: Number.MAX_SAFE_INTEGER, signal: stop })) {
        if (part.bytes === undefined) continue;
        all = Buffer.concat([all, part.bytes]);
        // The end of it: a command that never stops writing must not take the memory.
        if (all.length > 2 * EXPECT_BYTES) all = all.subarray(-EXPECT_BYTES);
        const found = typeof pattern === 'string' ? all.includes(pattern) : all.toString('latin1').search(pattern) >= 0;
        if (found) return all;
      }
    } catch (error) {
      if (stop.aborted) throw fail('RUNTIME_SHELL_EXPECT', { pattern: String(pattern), ms: timeoutMs });
      throw error;
    }
    throw fail('RUNTIME_SHELL_LOST', { reason: this.lostReason ?? 'it has ended' });
  }

  async close(): Promise<void> {
    await this.command.killTree();
    await this.losing;
  }

  private async runNow(text: string, timeoutMs: number | undefined): Promise<ShellResult> {
    if (text.includes('\0')) {
      throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', {
        command: 'the command',
        path: 'PATH',
        reason: 'it holds a NUL byte',
      });
    }
    if (this.lostReason !== undefined) throw fail('RUNTIME_SHELL_LOST', { reason: this.lostReason });
    const token = randomBytes(12).toString('hex');
    const from = { ...this.at };
    const finished = new Promise<{ status: number; mark: Mark }>((resolve) => {
      this.running = { token, done: (status, mark) => resolve({ status, mark }) };
    });
    // `command`: or a syntax error would end the shell. What is saved of 0, 4 and 9 meanwhile no program inherits.
    this.feed(`\\command eval ${quoted(`${text}\n`)} <&9 9<&- 4>&-\n\\command echo "${token} $?" >&4\n`);
    const limit = new AbortController();
    const lost = this.losing.then(() => undefined);
    let timedOut = false;
    if (timeoutMs !== undefined) {
      this.link.patience(timeoutMs, limit.signal).then(
        () => {
          timedOut = true;
          this.press(limit.signal).catch(() => {});
        },
        () => {},
      );
    }
    const end = await Promise.race([finished, lost]);
    limit.abort();
    this.running = undefined;
    const to = {
      stdout: end?.mark.stdout ?? this.command.total('stdout'),
      stderr: end?.mark.stderr ?? this.command.total('stderr'),
    };
    while (
      !this.command.isOver &&
      (this.command.total('stdout') < to.stdout || this.command.total('stderr') < to.stderr)
    ) {
      await this.command.change();
    }
    this.at = to;
    const [stdout, stderr] = [await this.captured('stdout', from, to), await this.captured('stderr', from, to)];
    const result = this.command.result;
    return {
      exitCode: end?.status ?? result?.exitCode ?? 137,
      stdout,
      stderr,
      stdoutOffset: from.stdout,
      stderrOffset: from.stderr,
      missingBytes: to.stdout - from.stdout - stdout.length + (to.stderr - from.stderr - stderr.length),
      timedOut,
      lost: end === undefined,
    };
  }

  /** An interrupt; then SIGKILL to all but the shell; then to all. */
  private async press(until: AbortSignal): Promise<void> {
    this.interrupt();
    await delay(PATIENCE_MS, undefined, { signal: until });
    await this.link.killOthers(this.command.id);
    await delay(PATIENCE_MS, undefined, { signal: until });
    await this.command.killTree();
  }

  private feed(script: string): void {
    // Longer than the agent takes at once it is cut anywhere: the shell reads on.
    const bytes = Buffer.from(script);
    for (let at = 0; at < bytes.length; at += 1 << 20)
      this.link.send(AGENT_FRAME.script, this.id, bytes.subarray(at, at + (1 << 20)));
  }

  private marked(mark: Mark | undefined): void {
    // The end of it while the shell lives: it has become another program.
    if (mark === undefined) return;
    this.text = `${this.text}${mark.bytes.toString('latin1')}`.slice(-4096);
    const { running } = this;
    if (running === undefined) return;
    const found = new RegExp(`^${running.token} (\\d+)\\n`, 'm').exec(this.text);
    if (found === null) return;
    this.text = '';
    running.done(Number(found[1]), mark);
  }

  private lose(reason: string): void {
    this.lostReason = reason;
    this.noteLost();
  }

  /** The last megabytes of it, where there are more. */
  private async captured(
    stream: StreamName,
    from: Record<StreamName, number>,
    to: Record<StreamName, number>,
  ): Promise<Buffer> {
    const start = Math.max(from[stream], to[stream] - CAPTURE_BYTES);
    const parts: Buffer[] = [];
    const other = stream === 'stdout' ? 'stderr' : 'stdout';
    const where = { [stream]: start, [other]: Number.MAX_SAFE_INTEGER, follow: false };
    for await (const part of this.command.output(where)) {
      if (part.bytes === undefined) continue;
      if (part.offset >= to[stream]) break;
      parts.push(part.bytes.subarray(0, to[stream] - part.offset));
    }
    return Buffer.concat(parts);
  }
}

function quoted(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
