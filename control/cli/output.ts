/**
 * How the command line writes: results on stdout, everything else on stderr.
 *
 * `write` waits while the reader of a pipe is slow. A reader that has gone away (`dsec ls IMAGE | head`) is no error: it
 * ends the command quietly, through `onGone`.
 */
import { once } from 'node:events';
import type { Writable } from 'node:stream';
import { display, displayText } from '#base';
import { fail } from '../errors.ts';

export interface Column {
  readonly title: string;
  /** Numbers stand right. */
  readonly right?: boolean;
}

export class Output {
  readonly #stdout: Writable & { isTTY?: boolean };
  readonly #stderr: Writable & { isTTY?: boolean };
  readonly #beforeWrite: () => void;
  #gone = false;

  /** `beforeWrite`: takes away what is drawn on the terminal. */
  constructor(
    stdout: Writable & { isTTY?: boolean },
    stderr: Writable & { isTTY?: boolean },
    onGone: () => void,
    beforeWrite: () => void = () => {},
  ) {
    this.#stdout = stdout;
    this.#stderr = stderr;
    this.#beforeWrite = beforeWrite;
    stdout.on('error', (error: NodeJS.ErrnoException) => {
      this.#gone = true;
      if (error.code === 'EPIPE' || error.code === 'ERR_STREAM_DESTROYED') onGone();
      else throw fail('CLI_OUTPUT', { reason: error.message }, error);
    });
    stderr.on('error', () => {});
  }

  get isTerminal(): boolean {
    return this.#stdout.isTTY === true;
  }

  get stdout(): Writable {
    return this.#stdout;
  }

  get stderr(): Writable {
    return this.#stderr;
  }

  async write(chunk: string | Uint8Array): Promise<void> {
    if (this.#gone) return;
    this.#beforeWrite();
    if (this.#stdout.write(chunk)) return;
    // `close` too: a reader that leaves while we wait for it never drains.
    const waiting = new AbortController();
    const { signal } = waiting;
    await Promise.race([once(this.#stdout, 'drain', { signal }), once(this.#stdout, 'close', { signal })]).catch(
      () => {},
    );
    // The listener for the other one goes too: there are many writes.
    waiting.abort();
  }

  async line(text = ''): Promise<void> {
    await this.write(`${displayText(text)}\n`);
  }

  /** One JSON value on one line. */
  async json(value: unknown): Promise<void> {
    await this.line(JSON.stringify(value, bigintAsNumber));
  }

  async table(columns: readonly Column[], rows: readonly (readonly string[])[]): Promise<void> {
    await this.write(displayText(formatTable(columns, rows)));
  }

  /** For people, on stderr: notes and warnings. */
  note(text: string): void {
    this.#beforeWrite();
    this.#stderr.write(`${displayText(text)}\n`);
  }
}

function bigintAsNumber(_key: string, value: unknown): unknown {
  return typeof value === 'bigint' ? Number(value) : value;
}

/** Columns as wide as their widest cell, two spaces between, no blanks at line ends. */
export function formatTable(columns: readonly Column[], rows: readonly (readonly string[])[]): string {
  const widths = columns.map((column, i) => Math.max(column.title.length, ...rows.map((row) => (row[i] ?? '').length)));
  const line = (cells: readonly string[]) =>
    columns
      .map((column, i) => (column.right ? (cells[i] ?? '').padStart(widths[i]!) : (cells[i] ?? '').padEnd(widths[i]!)))
      .join('  ')
      .trimEnd();
  return [columns.map((column) => column.title), ...rows].map((cells) => `${line(cells)}\n`).join('');
}

/** A byte string for a person's terminal. */
export const shown = display;
