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

export type ClipboardSelection = 'clipboard' | 'primary';

/** Which of them, where its guest has several (X11). */
export interface ClipboardOptions extends CallOptions {
  /** `primary` is what is selected, pasted by the middle button. Default: `clipboard`. */
  readonly selection?: ClipboardSelection;
}

/** What is copied and pasted in a guest with an agent of SPICE. Others throw UnsupportedError. At most 4 MiB. */
export class SandboxClipboard {
  private readonly transport: Transport;
  private readonly path: string;

  constructor(transport: Transport, sandboxPath: string) {
    this.transport = transport;
    this.path = `${sandboxPath}/screen/clipboard`;
  }

  /** Undefined: no text is there. */
  async text(options: ClipboardOptions = {}): Promise<string | undefined> {
    return (await this.get('text/plain', options))?.toString('utf8');
  }

  /** A picture, as PNG. Undefined: none is there. */
  async png(options: ClipboardOptions = {}): Promise<Buffer | undefined> {
    return this.get('image/png', options);
  }

  /** For whoever pastes in the guest. */
  async setText(text: string, options: ClipboardOptions = {}): Promise<void> {
    await this.set('text/plain', new TextEncoder().encode(text), options);
  }

  async setPng(png: Uint8Array, options: ClipboardOptions = {}): Promise<void> {
    await this.set('image/png', png, options);
  }

  private get(type: string, { selection, ...options }: ClipboardOptions): Promise<Buffer | undefined> {
    const call = { ...options, query: { type, selection } };
    return this.transport.call('GET', this.path, call, async (answer) => {
      const bytes = await drain(answer);
      return answer.statusCode === 204 ? undefined : bytes;
    });
  }

  private async set(type: string, bytes: Uint8Array, { selection, ...options }: ClipboardOptions): Promise<void> {
    await this.transport.json('PUT', this.path, { ...options, query: { type, selection }, bytes });
  }
}

export class SandboxScreen {
  readonly clipboard: SandboxClipboard;
  private readonly transport: Transport;
  private readonly path: string;

  constructor(transport: Transport, sandboxPath: string) {
    this.transport = transport;
    this.path = sandboxPath;
    this.clipboard = new SandboxClipboard(transport, sandboxPath);
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
