/**
 * A shell on a terminal in a sandbox, over plain HTTP: its output is one answer read as it comes, and opened again where it was when the connection
 * breaks; what is typed goes in requests one after the other, each with all that has gathered while the one before was under way.
 */
import { bodyChunks } from '../api/body-chunks.js';
import { ApiError } from '../api/client.js';
import { parseOutput } from '../api/output-frames.js';
import { seen, whileSeen } from '../state/visibility.js';

/** bash where there is one, as `dsec sandbox shell` does. */
const SCRIPT = 'command -v bash >/dev/null 2>&1 && exec bash; exec sh -i';
const AGAIN_MS = 1000;
const MOST_TRIES = 30;
const PIECE_BYTES = 64 << 10;

/** @typedef {{ rows: number, columns: number }} Size */
/**
 * @typedef {object} ShellEvents
 * @property {(bytes: Uint8Array) => Promise<void>} output Resolves when there is room for more.
 * @property {(missingBytes: number) => void} missing
 * @property {(state: 'connected' | 'reconnecting') => void} state
 * @property {(text: string) => void} ended
 */

export class ShellCommand {
  /**
   * @param {import('../api/client.js').ApiClient} api
   * @param {string} where `/v1/sandboxes/ID`
   * @param {ShellEvents} events
   */
  constructor(api, where, events) {
    this.api = api;
    this.where = where;
    this.events = events;
    this.stop = new AbortController();
    /** @type {string | undefined} */
    this.command = undefined;
    this.ended = false;
    this.offset = 0;
    /** @type {Uint8Array[]} */
    this.typed = [];
    this.sending = false;
    /** @type {Size | undefined} */
    this.size = undefined;
    this.resizing = false;
  }

  /** @param {Size} size @throws ApiError */
  async open(size) {
    const body = { args: ['/bin/sh', '-c', SCRIPT], env: ['TERM=xterm-256color'], stdin: true, terminal: size };
    const { id } = await this.api.post(`${this.where}/commands`, body, this.stop.signal);
    this.command = `${this.where}/commands/${id}`;
    this.size = size;
    void this.#read();
    void this.#send();
  }

  async #read() {
    const { signal } = this.stop;
    for (let tries = 0; tries < MOST_TRIES && !signal.aborted; tries++) {
      await seen(signal);
      const looking = whileSeen(signal);
      try {
        const response = await this.api.open(`${this.command}/output?stdout=${this.offset}`, looking);
        this.events.state('connected');
        for await (const news of parseOutput(bodyChunks(response))) {
          tries = 0;
          if (news.kind === 'result') return this.#end(endText(news.result));
          if (news.kind === 'error') return this.#end(news.error.message);
          // A terminal has one stream.
          if (news.stream === 'stderr') continue;
          if (news.kind === 'missing') {
            this.offset = news.offset + news.missingBytes;
            this.events.missing(news.missingBytes);
          } else {
            // Told again after a break.
            const bytes = news.bytes.subarray(Math.max(0, this.offset - news.offset));
            this.offset = Math.max(this.offset, news.offset + news.bytes.length);
            if (bytes.length > 0) await this.events.output(bytes);
          }
        }
      } catch (error) {
        if (signal.aborted) return;
        if (looking.signal.aborted) {
          tries = -1;
          continue;
        }
        if (error instanceof ApiError && !isPassing(error)) return this.#end(error.message);
      } finally {
        looking.end();
      }
      this.events.state('reconnecting');
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
    if (!signal.aborted) this.#end('the connection is lost');
  }

  /** @param {string} text */
  #end(text) {
    if (this.ended) return;
    this.ended = true;
    this.events.ended(text);
  }

  /** @param {Uint8Array} bytes */
  write(bytes) {
    if (this.ended) return;
    for (let at = 0; at < bytes.length; at += PIECE_BYTES) this.typed.push(bytes.subarray(at, at + PIECE_BYTES));
    void this.#send();
  }

  async #send() {
    if (this.sending || this.command === undefined) return;
    this.sending = true;
    while (this.typed.length > 0 && !this.ended && !this.stop.signal.aborted) {
      const bytes = this.#gathered();
      try {
        await this.api.json(`${this.command}/stdin?close=false`, { method: 'POST', bytes, signal: this.stop.signal });
      } catch (error) {
        // Whether it arrived is not known: sent again it might be typed twice.
        if (!this.stop.signal.aborted) this.events.missing(-bytes.length);
        if (error instanceof ApiError && !isPassing(error)) break;
      }
    }
    this.sending = false;
  }

  #gathered() {
    const pieces = [];
    let length = 0;
    while (this.typed.length > 0 && length < PIECE_BYTES) {
      const piece = /** @type {Uint8Array} */ (this.typed.shift());
      pieces.push(piece);
      length += piece.length;
    }
    const all = new Uint8Array(length);
    let at = 0;
    for (const piece of pieces) {
      all.set(piece, at);
      at += piece.length;
    }
    return all;
  }

  /** The newest size is what counts: those between are left out. @param {Size} size */
  async resize(size) {
    if (this.size?.rows === size.rows && this.size.columns === size.columns) return;
    this.size = size;
    if (this.resizing || this.command === undefined) return;
    this.resizing = true;
    let told;
    while (told !== this.size && !this.ended) {
      told = this.size;
      await this.api.post(`${this.command}/resize`, told, this.stop.signal).catch(() => {});
    }
    this.resizing = false;
  }

  /** The shell and what it started end with its window. */
  close() {
    this.stop.abort();
    if (this.command !== undefined && !this.ended) this.api.post(`${this.command}/kill`).catch(() => {});
    this.ended = true;
  }
}

/** Whether the same may work in a moment. @param {ApiError} error */
function isPassing({ status, retryable }) {
  return status === 0 || retryable || status === 502 || status === 503 || status === 504;
}

/** @param {{ exitCode: number, signal?: string }} result */
function endText({ exitCode, signal }) {
  return signal ? `the shell was ended by ${signal}` : `the shell exited with ${exitCode}`;
}
