/**
 * A headless Chromium, driven over its pipe in the DevTools protocol: messages of JSON that end with a zero byte, on descriptors 3 and 4. As much
 * of it as the tests of the console need.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Readable, Writable } from 'node:stream';

const CANDIDATES = ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'];
/** Waits are for conditions; this is only for what never comes. */
const LONG_MS = 60_000;
const POLL_MS = 50;

export function findChromium(): string | undefined {
  return [process.env.DSEC_CHROMIUM, ...CANDIDATES].find((path) => path !== undefined && existsSync(path));
}

type Parameters = Record<string, unknown>;
type Answer = Record<string, unknown>;
interface Message {
  readonly id?: number;
  readonly method?: string;
  readonly params?: Answer;
  readonly result?: Answer;
  readonly error?: { readonly message: string };
  readonly sessionId?: string;
}

export class Chromium {
  private readonly child: ChildProcess;
  private readonly folder: string;
  private readonly input: Writable;
  private readonly waiting = new Map<
    number,
    { readonly resolve: (answer: Answer) => void; readonly reject: (error: Error) => void }
  >();
  private readonly listeners = new Map<string, (method: string, params: Answer) => void>();
  private last = 0;
  private rest = '';

  private constructor(child: ChildProcess, folder: string) {
    this.child = child;
    this.folder = folder;
    this.input = child.stdio[3] as Writable;
    const output = child.stdio[4] as Readable;
    output.setEncoding('utf8').on('data', (text: string) => this.heard(text));
    this.input.on('error', () => {});
    child.on('close', () => {
      for (const { reject } of this.waiting.values()) reject(new Error('chromium has ended'));
      this.waiting.clear();
    });
  }

  static async start(path: string): Promise<Chromium> {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-chromium-'));
    const args = [
      '--headless=new',
      '--remote-debugging-pipe',
      `--user-data-dir=${folder}`,
      '--no-first-run',
      '--disable-gpu',
      '--disable-dev-shm-usage',
      '--disable-background-networking',
      '--disable-component-update',
      '--disable-sync',
      '--hide-scrollbars',
      '--force-color-profile=srgb',
      // It refuses to be root otherwise; it loads our own page alone.
      ...(process.getuid?.() === 0 ? ['--no-sandbox'] : []),
      'about:blank',
    ];
    const child = spawn(path, args, {
      stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'],
      env: { ...process.env, HOME: folder, XDG_CONFIG_HOME: folder, XDG_CACHE_HOME: folder },
    });
    const browser = new Chromium(child, folder);
    await browser.send('Browser.getVersion');
    return browser;
  }

  async page(
    options: { readonly width?: number; readonly height?: number; readonly light?: boolean } = {},
  ): Promise<Page> {
    const { browserContextId } = await this.send('Target.createBrowserContext');
    const { targetId } = await this.send('Target.createTarget', { url: 'about:blank', browserContextId });
    const { sessionId } = await this.send('Target.attachToTarget', { targetId, flatten: true });
    const page = new Page(this, String(sessionId), String(targetId));
    this.listeners.set(String(sessionId), (method, params) => page.heard(method, params));
    await page.begin(options);
    return page;
  }

  send(method: string, params: Parameters = {}, sessionId?: string): Promise<Answer> {
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.input.write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
    });
  }

  private heard(text: string): void {
    const messages = (this.rest + text).split('\0');
    this.rest = messages.pop() ?? '';
    for (const one of messages) {
      const { id, method, params = {}, result = {}, error, sessionId } = JSON.parse(one) as Message;
      if (method !== undefined) this.listeners.get(sessionId ?? '')?.(method, params);
      if (id === undefined) continue;
      const waiting = this.waiting.get(id);
      this.waiting.delete(id);
      if (error === undefined) waiting?.resolve(result);
      else waiting?.reject(new Error(error.message));
    }
  }

  async end(): Promise<void> {
    const ended = new Promise((resolve) => this.child.once('close', resolve));
    this.send('Browser.close').catch(() => {});
    const timer = setTimeout(() => this.child.kill('SIGKILL'), 10_000);
    await ended;
    clearTimeout(timer);
    rmSync(this.folder, { recursive: true, force: true, maxRetries: 5 });
  }
}

export class Page {
  /** What the page reported: errors, and what its policy refused. */
  readonly complaints: string[] = [];
  private readonly browser: Chromium;
  private readonly session: string;
  private readonly target: string;

  constructor(browser: Chromium, session: string, target: string) {
    this.browser = browser;
    this.session = session;
    this.target = target;
  }

  private send(method: string, params?: Parameters): Promise<Answer> {
    return this.browser.send(method, params, this.session);
  }

  async begin({
    width = 1440,
    height = 900,
    light = false,
  }: {
    width?: number;
    height?: number;
    light?: boolean;
  }): Promise<void> {
    for (const domain of ['Page', 'Runtime', 'Log']) await this.send(`${domain}.enable`);
    await this.size(width, height);
    const features = [{ name: 'prefers-color-scheme', value: light ? 'light' : 'dark' }];
    await this.send('Emulation.setEmulatedMedia', { features });
  }

  heard(method: string, params: Answer): void {
    if (method === 'Runtime.exceptionThrown') this.complaints.push(JSON.stringify(params.exceptionDetails));
    if (method === 'Log.entryAdded') {
      const { level, text, source } = params.entry as { level: string; text: string; source: string };
      // An answer that is no success is the API's way to say so.
      if (level === 'error' && source !== 'network') this.complaints.push(`${source}: ${text}`);
    }
    if (method === 'Runtime.consoleAPICalled' && params.type === 'error')
      this.complaints.push(JSON.stringify(params.args));
  }

  async size(width: number, height: number): Promise<void> {
    await this.send('Emulation.setDeviceMetricsOverride', { width, height, deviceScaleFactor: 1, mobile: false });
  }

  async go(url: string): Promise<void> {
    await this.send('Page.navigate', { url });
    await this.until(() => document.readyState === 'complete');
  }

  /** Runs in the page: it sees nothing of the test but its arguments. */
  async run<T, A extends readonly unknown[]>(work: (...args: A) => T, ...args: A): Promise<Awaited<T>> {
    // What compiled this file may have put a helper around functions with names.
    const call = `(${work.toString()})(...${JSON.stringify(args)})`;
    const expression = `(() => { const __name = (one) => one; return ${call}; })()`;
    const { result, exceptionDetails } = await this.send('Runtime.evaluate', {
      expression,
      awaitPromise: true,
      returnByValue: true,
    });
    if (exceptionDetails !== undefined) throw new Error(JSON.stringify(exceptionDetails));
    return (result as { value: Awaited<T> }).value;
  }

  /** Until it gives something that is true. */
  async until<T, A extends readonly unknown[]>(work: (...args: A) => T, ...args: A): Promise<Awaited<T>> {
    const end = Date.now() + LONG_MS;
    for (;;) {
      // A page that is being left has nothing to ask.
      const value = await this.run(work, ...args).catch((error: Error) => {
        if (Date.now() > end) throw error;
        return undefined as Awaited<T>;
      });
      if (value) return value;
      if (Date.now() > end) {
        const text = await this.run(() => document.body.textContent?.slice(0, 2000));
        throw new Error(`never true: ${work}\nthe page says: ${text}\ncomplaints: ${this.complaints.join('\n')}`);
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  /** Until the text is somewhere in sight. */
  async sees(text: string, within = 'body'): Promise<void> {
    await this.until(
      (wanted, selector) => document.querySelector(selector)?.textContent?.includes(wanted) === true,
      text,
      within,
    );
  }

  /** A real click in the middle of the first element that fits and, if `text` is given, says so. */
  async click(selector: string, text?: string): Promise<void> {
    const at = await this.until(
      (wanted, say) => {
        const fits = [...document.querySelectorAll<HTMLElement>(wanted)];
        const found = fits.find(
          (one) => one.offsetParent !== null && (say === undefined || say === null || one.textContent.includes(say)),
        );
        if (found === undefined) return undefined;
        found.scrollIntoView({ block: 'nearest' });
        const { left, top, width, height } = found.getBoundingClientRect();
        return { x: left + width / 2, y: top + height / 2 };
      },
      selector,
      text,
    );
    await this.mouse('mouseMoved', at!);
    await this.mouse('mousePressed', at!);
    await this.mouse('mouseReleased', at!);
  }

  async hover(selector: string): Promise<void> {
    const at = await this.until((wanted) => {
      const rect = document.querySelector(wanted)?.getBoundingClientRect();
      return rect && { x: rect.left + rect.width / 2, y: rect.top + rect.height / 2 };
    }, selector);
    await this.mouse('mouseMoved', at!);
  }

  private async mouse(type: string, at: { x: number; y: number }): Promise<void> {
    const pressed = type === 'mouseMoved' ? {} : { button: 'left', clickCount: 1 };
    await this.send('Input.dispatchMouseEvent', { type, ...at, ...pressed });
  }

  /** As if pasted or spoken: what has the focus gets it. */
  async insert(text: string): Promise<void> {
    await this.send('Input.insertText', { text });
  }

  /** `modifiers`: 1 alt, 2 control, 4 meta, 8 shift. */
  async press(key: string, modifiers = 0): Promise<void> {
    const code = /^[a-z]$/i.test(key) ? `Key${key.toUpperCase()}` : key.length === 1 ? '' : key;
    const text = modifiers % 8 === 0 ? (TYPED[key] ?? (key.length === 1 ? key : undefined)) : undefined;
    const windowsVirtualKeyCode = KEY_CODES[key] ?? (/^[a-z0-9]$/i.test(key) ? key.toUpperCase().charCodeAt(0) : 0);
    const event = { key, code, modifiers, windowsVirtualKeyCode };
    await this.send('Input.dispatchKeyEvent', { type: text === undefined ? 'rawKeyDown' : 'keyDown', text, ...event });
    await this.send('Input.dispatchKeyEvent', { type: 'keyUp', ...event });
  }

  async type(text: string): Promise<void> {
    for (const key of text) await this.press(key);
  }

  async screenshot(path: string): Promise<void> {
    const { data } = await this.send('Page.captureScreenshot', { format: 'png' });
    writeFileSync(path, Buffer.from(String(data), 'base64'));
  }

  async grant(permissions: readonly string[], origin: string): Promise<void> {
    await this.browser.send('Browser.grantPermissions', { permissions, origin }).catch(() => {});
  }

  async close(): Promise<void> {
    await this.browser.send('Target.closeTarget', { targetId: this.target });
  }
}

const TYPED: Readonly<Record<string, string>> = { Enter: '\r', Tab: '\t' };
const KEY_CODES: Readonly<Record<string, number>> = {
  Enter: 13,
  Escape: 27,
  Tab: 9,
  Home: 36,
  End: 35,
  PageDown: 34,
  PageUp: 33,
  ArrowUp: 38,
  ArrowDown: 40,
  ArrowLeft: 37,
  ArrowRight: 39,
};
