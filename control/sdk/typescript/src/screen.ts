/** The screen, keyboard, mouse and serial console of a full machine (`DSecVMRunArgs`). Others throw UnsupportedError. */
import type { Buffer } from 'node:buffer';
import { type CallOptions, drain, type Transport } from './transport.ts';

export type MouseButton = 'left' | 'middle' | 'right';

/** Places are pixels of the picture. */
export type ScreenAction =
  | { readonly type: 'key'; readonly keys: readonly string[] }
  | { readonly type: 'text'; readonly text: string }
  | { readonly type: 'move'; readonly x: number; readonly y: number }
  | {
      readonly type: 'click';
      readonly x?: number;
      readonly y?: number;
      readonly button?: MouseButton;
      readonly count?: number;
    }
  | { readonly type: 'press' | 'release'; readonly button?: MouseButton }
  | { readonly type: 'scroll'; readonly steps: number };

export class SandboxScreen {
  private readonly transport: Transport;
  private readonly path: string;

  constructor(transport: Transport, sandboxPath: string) {
    this.transport = transport;
    this.path = sandboxPath;
  }

  /** What it shows now, as PNG. */
  async picture(options: CallOptions = {}): Promise<Buffer> {
    return this.transport.call('GET', `${this.path}/screen`, options, drain);
  }

  /** In order; nothing is done when one of them cannot be. */
  async act(actions: readonly ScreenAction[], options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/screen/input`, { ...options, body: { actions } });
  }

  /** ASCII, as on a keyboard of the United States. */
  async type(text: string, options: CallOptions = {}): Promise<void> {
    await this.act([{ type: 'text', text }], options);
  }

  /** Each a key, or several held together: `ctrl+alt+delete`. */
  async press(...chords: string[]): Promise<void> {
    await this.act(chords.map((chord) => ({ type: 'key', keys: chord === '+' ? ['+'] : chord.split('+') })));
  }

  async click(x: number, y: number, options: { readonly button?: MouseButton; readonly count?: number } = {}) {
    await this.act([{ type: 'click', x, y, ...options }]);
  }

  async move(x: number, y: number): Promise<void> {
    await this.act([{ type: 'move', x, y }]);
  }

  /** What the machine wrote to its serial console last, at most 64 KiB. */
  async consoleText(options: CallOptions = {}): Promise<string> {
    return (await this.transport.call('GET', `${this.path}/console`, options, drain)).toString('utf8');
  }

  async writeConsole(text: string | Uint8Array, options: CallOptions = {}): Promise<void> {
    const bytes = typeof text === 'string' ? new TextEncoder().encode(text) : text;
    await this.transport.json('POST', `${this.path}/console`, { ...options, bytes });
  }
}
