/** The screen of a full machine in the console: a guest that repeats what is typed, seen and typed to in a browser over the whole way of a cluster. */
import { execFileSync } from 'node:child_process';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { WebSocket } from 'ws';
import { fullVmProblem } from '#runtime';
import { until } from '../edge-site.ts';
import { consoleSite, consoleSiteMissing } from './console-site.ts';

const missing = consoleSiteMissing() || (fullVmProblem() ?? '');
if (missing !== '') console.log(`skipped: ${missing}`);

describe.skipIf(missing !== '')('the screen of a machine in the console', { timeout: 400_000 }, () => {
  const site = consoleSite(({ env }) => {
    const script = join(import.meta.dirname, '../../../scripts/echo-image.mjs');
    execFileSync(process.execPath, [script, '--image', 'echo:1'], { env, stdio: 'pipe' });
  });
  const serial = async () => (await site.api('GET', '/v1/sandboxes/desk.edge-1/console')).text;
  /** How many colours, and how many pixels that are not the most frequent one: text on a ground. */
  const ink = () =>
    site.page.run(() => {
      const canvas = document.querySelector<HTMLCanvasElement>('.screen-place canvas');
      if (!canvas || canvas.width === 0) return 0;
      const { data } = canvas.getContext('2d')!.getImageData(0, 0, canvas.width, canvas.height);
      return new Uint32Array(data.buffer).filter((pixel) => (pixel & 0xffffff) !== 0).length;
    });

  it('shows it, and what is typed changes it', async () => {
    const { page, url, token } = site;
    const made = await site.api('POST', '/v1/sandboxes', {
      backend: 'vm',
      image: 'echo:1',
      name: 'desk',
      memoryBytes: 64 << 20,
    });
    expect(made.status, made.text).toBe(201);
    await page.go(`${url}/console/`);
    await page.click('#token');
    await page.insert(token);
    await page.press('Enter');
    await page.until(() => document.querySelector('.frame') !== null);
    await page.run(() => {
      location.hash = '#/sandboxes/desk.edge-1';
    });
    // Nobody could type into a shell of it; which tabs there are is known when the machine is.
    await page.until(() => document.querySelector<HTMLElement>('#tab-terminal')?.hidden === true);
    await page.sees('Screen', '.tabs');
    await page.click('.tab', 'Screen');
    await page.sees('connected', '.terminal-bar');
    await until('it has booted', async () => (await serial()).includes('R'));
    await until('the picture is there', async () => (await ink()) > 0);
    const before = await ink();
    await page.type('hello');
    await until('the machine has heard it', async () => (await serial()).includes('hello'));
    await until('the picture is another one', async () => (await ink()) > before);
    expect(page.complaints).toEqual([]);
  });

  it('pastes by typing, leaves the screen with a key, and is there in light and dark', async () => {
    const { page } = site;
    // The browser would ask whether it may.
    await page.run(() => {
      navigator.clipboard.readText = async () => 'Pasted: {1}';
    });
    await page.click('.terminal-bar .button', 'Paste');
    await until('the machine has heard it', async () => (await serial()).includes('Pasted: {1}'));
    await page.press('Escape', 2 + 8);
    await page.until(() => document.activeElement?.textContent === 'Paste');
    const ground = () => page.run(() => getComputedStyle(document.querySelector('.screen-place')!).backgroundColor);
    const seen = new Set<string>();
    for (const theme of ['dark', 'light']) {
      await page.until((wanted) => {
        if (document.documentElement.dataset.theme === wanted) return true;
        document.querySelector<HTMLElement>('.top .icon-button')?.click();
        return false;
      }, theme);
      seen.add(await ground());
    }
    expect(seen.size).toBe(2);
    if (process.env.DSEC_SHOW) await page.screenshot(process.env.DSEC_SHOW);
    expect(page.complaints).toEqual([]);
  });

  it('says so when the machine goes, and connects again', async () => {
    const { page } = site;
    expect((await site.api('POST', '/v1/sandboxes/desk.edge-1/pause')).status).toBe(200);
    await page.sees('the connection is lost', '.terminal-bar');
    await page.click('.terminal-bar .button', 'Connect');
    await page.sees('connected', '.terminal-bar');
    await page.click('.screen-place');
    await page.type('again');
    await until('the machine has heard it', async () => (await serial()).includes('again'));
    await site.api('DELETE', '/v1/sandboxes/desk.edge-1?force=true');
    expect(page.complaints).toEqual([]);
  });

  it('is not given to whoever has no token, or that of nobody', async () => {
    const { url, token } = site;
    const there = `${url.replace('http', 'ws')}/v1/sandboxes/desk.edge-1/ports/5900`;
    const token64 = (text: string) => `dsec.token.${Buffer.from(text).toString('base64url')}`;
    for (const [protocols, status] of [
      [['binary'], 401],
      [['binary', token64('wrong')], 401],
      [['binary', token64(token)], 410],
    ] as const) {
      const socket = new WebSocket(there, [...protocols]);
      socket.on('error', () => {});
      const answered = new Promise<number | undefined>((resolve) => {
        socket.once('unexpected-response', (_request, { statusCode }) => resolve(statusCode));
        socket.once('open', () => resolve(undefined));
      });
      expect(await answered).toBe(status);
      socket.terminate();
    }
  });
});
