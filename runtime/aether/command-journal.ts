/**
 * What is on disk of a sandbox's commands: `<sandbox>/commands/journal`, a line of JSON for each beginning, end and forgetting, appended in one
 * write. A line for each instead of a file for each: a command costs two writes then, where making, replacing and removing files cost most
 * of what a short one did. Output is in files beside it, where there is any.
 *
 * A line that cannot be read was being written when the machine went down or the disk was full: it counts for nothing. What is old is
 * left out when the journal is written anew, in a file that takes its place.
 */
import {
  closeSync,
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { systemCode } from '#base';
import type { ExecResult } from '../sandbox-api/exec.ts';

export interface CommandRecord {
  readonly id: number;
  /** For people: as UTF-8 as it goes, and not all of what is very long (`shownArgs`). */
  readonly args: readonly string[];
  readonly requestId?: string;
  readonly terminal: boolean;
  /** A shell session: it takes part of the protocol of its own. */
  readonly session: boolean;
  /** It runs for nobody: while only such commands run, the sandbox is idle. */
  readonly background?: boolean;
  /** Milliseconds since 1970. */
  readonly startedMs: number;
  /** The same, if the sandbox had never stood still: what it stood (`stoodMs`) comes on top. */
  readonly deadlineMs?: number;
  readonly result?: ExecResult;
  /** Why there is no result, and never will be. */
  readonly lost?: string;
}

type Line =
  | { readonly begun: CommandRecord }
  | { readonly ended: number; readonly result?: ExecResult; readonly lost?: string }
  | { readonly forgotten: number };

/** Of all arguments together, in characters. */
const SHOWN_LENGTH = 16 << 10;

/** So much of them as a record holds. */
export function shownArgs(args: readonly (string | Buffer)[]): string[] {
  const shown: string[] = [];
  let left = SHOWN_LENGTH;
  for (const arg of args) {
    const text = String(arg);
    if (left <= 0) return [...shown, '…'];
    shown.push(text.length > left ? `${text.slice(0, left)}…` : text);
    left -= text.length + 1;
  }
  return shown;
}

/** Where its output is. */
export function commandFolder(commands: string, id: number): string {
  return join(commands, String(id));
}

/** It is written anew when it has more than so much beside what it says. */
const STALE_BYTES = 256 << 10;
/** Of all sandboxes; those that were used longest ago are closed first. */
const OPEN_JOURNALS = 128;
const open = new Set<CommandJournal>();

export class CommandJournal {
  private readonly commands: string;
  private readonly path: string;
  /** As they are on record, and how many bytes of lines say so. */
  private readonly kept = new Map<number, { record: CommandRecord; bytes: number }>();
  private keptBytes = 0;
  private bytes = 0;
  private last = 0;
  private fd: number | undefined;
  /** What was written last may be half a line. */
  private torn = false;

  constructor(commands: string) {
    this.commands = commands;
    this.path = join(commands, 'journal');
    let text = '';
    try {
      text = readFileSync(this.path, 'utf8');
    } catch (error) {
      // Before the first command.
      if (systemCode(error) !== 'ENOENT') throw error;
    }
    this.bytes = Buffer.byteLength(text);
    this.torn = text !== '' && !text.endsWith('\n');
    for (const line of text.split('\n')) this.take(line);
    // Output of one whose lines were lost: its number is not used again.
    this.last = Math.max(this.last, ...foldersIn(commands));
  }

  /** By id. */
  records(): CommandRecord[] {
    return [...this.kept.values()].map(({ record }) => record).sort((a, b) => a.id - b.id);
  }

  /** No id is used twice, not even of one that was forgotten. */
  get lastId(): number {
    return this.last;
  }

  /** Of a journal that goes on with another's commands: ids up to this one were given. @throws what the file system says */
  skipTo(id: number): void {
    this.write({ forgotten: id });
  }

  /** @throws what the file system says */
  begin(record: CommandRecord): void {
    this.write({ begun: record });
  }

  /** @throws what the file system says */
  end({ id, result, lost }: CommandRecord): void {
    if (this.kept.has(id)) this.write({ ended: id, result, lost });
  }

  /** Its output goes with it. */
  forget(id: number): void {
    const folder = commandFolder(this.commands, id);
    if (existsSync(folder)) rmSync(folder, { recursive: true, force: true });
    if (!this.kept.has(id)) return;
    try {
      this.write({ forgotten: id });
    } catch {
      // It is on record once more after a restart.
    }
  }

  /** No descriptor is held any more, until something is written again. */
  close(): void {
    if (this.fd !== undefined) closeSync(this.fd);
    this.fd = undefined;
    open.delete(this);
  }

  private write(line: Line): void {
    // Both: what is written anew costs as much as it spares, whatever it is.
    if (this.bytes - this.keptBytes > Math.max(STALE_BYTES, this.keptBytes)) this.writeAnew();
    const text = `${JSON.stringify(line)}\n`;
    const bytes = Buffer.from(this.torn ? `\n${text}` : text);
    this.torn = true;
    const fd = this.opened();
    let done = 0;
    while (done < bytes.length) {
      const n = writeSync(fd, bytes, done);
      done += n;
      this.bytes += n;
    }
    this.torn = false;
    this.apply(line, Buffer.byteLength(text));
  }

  private opened(): number {
    if (this.fd === undefined) {
      try {
        this.fd = openSync(this.path, 'a', 0o600);
      } catch (error) {
        if (systemCode(error) !== 'ENOENT') throw error;
        // Not those above: of a sandbox that was removed nothing comes back.
        mkdirSync(this.commands, { mode: 0o700 });
        this.fd = openSync(this.path, 'a', 0o600);
      }
    }
    open.delete(this);
    open.add(this);
    if (open.size > OPEN_JOURNALS) for (const oldest of [...open].slice(0, OPEN_JOURNALS / 2)) oldest.close();
    return this.fd;
  }

  private writeAnew(): void {
    // The last number stays known.
    const lines: Line[] = [{ forgotten: this.last }, ...this.records().map((record) => ({ begun: record }))];
    const texts = lines.map((line) => `${JSON.stringify(line)}\n`);
    const whole = texts.join('');
    try {
      writeFileSync(`${this.path}.new`, whole, { mode: 0o600 });
      renameSync(`${this.path}.new`, this.path);
    } catch {
      // On a full disk it stays as it is.
      rmSync(`${this.path}.new`, { force: true });
      return;
    }
    this.close();
    this.torn = false;
    this.bytes = Buffer.byteLength(whole);
    this.kept.clear();
    this.keptBytes = 0;
    lines.forEach((line, at) => {
      this.apply(line, Buffer.byteLength(texts[at]!));
    });
  }

  private take(text: string): void {
    try {
      const line: unknown = JSON.parse(text);
      if (typeof line === 'object' && line !== null) this.apply(line as Line, Buffer.byteLength(text) + 1);
    } catch {
      // See above.
    }
  }

  /** `bytes`: of its line. */
  private apply(line: Line, bytes: number): void {
    if ('begun' in line) {
      this.keep(line.begun, bytes);
    } else if ('ended' in line) {
      const one = this.kept.get(line.ended);
      if (one === undefined) return;
      const { result, lost } = line;
      this.keep({ ...one.record, result, lost }, one.bytes + bytes);
    } else {
      this.last = Math.max(this.last, line.forgotten);
      this.keptBytes -= this.kept.get(line.forgotten)?.bytes ?? 0;
      this.kept.delete(line.forgotten);
    }
  }

  private keep(record: CommandRecord, bytes: number): void {
    this.last = Math.max(this.last, record.id);
    this.keptBytes += bytes - (this.kept.get(record.id)?.bytes ?? 0);
    this.kept.set(record.id, { record, bytes });
  }
}

function foldersIn(commands: string): number[] {
  try {
    return readdirSync(commands)
      .filter((name) => /^[1-9]\d*$/.test(name))
      .map(Number);
  } catch {
    return [];
  }
}
