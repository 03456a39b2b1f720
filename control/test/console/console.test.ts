/** The console in a real browser, in front of a made cluster of 160 nodes and 10,000 sandboxes whose names mean harm. */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { Chromium, findChromium, type Page } from './chromium.ts';
import { HOSTILE } from './made-cluster.ts';
import { type MadeServer, READER, startMadeServer, TOKEN } from './made-server.ts';

const chromium = findChromium();
if (chromium === undefined)
  console.log('skipped: there is no Chromium here (apt-get install chromium, or $DSEC_CHROMIUM)');

const BOX = 'box-00009.edge-010';

describe.skipIf(chromium === undefined)('the console in a browser', { timeout: 180_000 }, () => {
  let browser: Chromium;
  let server: MadeServer;
  let page: Page;

  beforeAll(async () => {
    browser = await Chromium.start(chromium!);
  });
  afterAll(() => browser?.end());

  beforeEach(async ({ task }) => {
    // As many only where they are what it is about.
    server = await startMadeServer({ sandboxes: task.name.includes('ten thousand') ? 10_000 : 300 });
    page = await browser.page();
  });
  afterEach(async () => {
    // Whatever a test did: no name became an element, and the policy had nothing to refuse.
    expect(page.complaints).toEqual([]);
    expect(await page.run(() => 'harmed' in window)).toBe(false);
    expect(await page.run((hostile) => location.href.includes(hostile), TOKEN)).toBe(false);
    await page.close();
    await server.close();
  });

  /** As somebody does who types it in. */
  async function logIn(token = TOKEN): Promise<void> {
    await page.go(`${server.url}/console/`);
    await page.click('#token');
    await page.insert(token);
    await page.press('Enter');
  }
  async function open(place: string, token = TOKEN): Promise<void> {
    await logIn(token);
    await page.until(() => document.querySelector('.frame') !== null);
    await page.run((hash) => {
      location.hash = hash;
    }, place);
  }
  /** Another view of a page that is there, with all that it has to show. */
  async function show(place: string): Promise<void> {
    await page.run((hash) => {
      if (location.hash !== hash) document.querySelector('.view')?.setAttribute('data-old', '');
      location.hash = hash;
    }, place);
    await page.until(() => {
      return document.querySelector('.view:not([data-old])') !== null && document.querySelector('.loading') === null;
    });
  }

  it('takes a token once, keeps it in the tab, and asks again when it is refused', async () => {
    await logIn('wrong');
    await page.sees('the token is not valid', '.login-message');
    await logIn();
    await page.sees('158', '.summary');
    expect(await page.run(() => [sessionStorage.getItem('dsec.token'), localStorage.length, document.cookie])).toEqual([
      TOKEN,
      0,
      '',
    ]);
    await page.go(`${server.url}/console/#/images`);
    await page.sees('swe/task-0001:1');
    server.revoke();
    await page.sees('expired or was revoked', '.login');
    expect(await page.run(() => sessionStorage.getItem('dsec.token'))).toBe(null);
  });

  it('shows every node, the chosen one in full, and drains it', async () => {
    await open('#/nodes');
    await page.until(() => document.querySelectorAll('.heat-tile').length === 160);
    const tile = (n: number) =>
      page.run((i) => document.querySelectorAll<HTMLElement>('.heat-tile')[i]?.dataset.state, n);
    expect([await tile(0), await tile(12), await tile(41)]).toEqual(['healthy', 'draining', 'dead']);
    await page.sees('2 draining, 2 dead', '.summary');
    await page.hover('.heat-tile:nth-child(3)');
    await page.sees('edge-003', '.tip');
    await page.click('.heat-tile:nth-child(3)');
    await page.sees('http://10.20.0.3:8600', '.detail');
    await page.sees(HOSTILE, '.detail');
    await page.click('.detail .button', 'Drain');
    await page.click('dialog .button-main', 'Drain');
    await page.sees('draining', '.detail-title');
    expect(server.asked).toContain('POST /v1/nodes/edge-003/drain');
    await page.click('.detail .button', 'Take sandboxes');
    await page.click('dialog .button-main');
    await page.sees('healthy', '.detail-title');
    await page.press('Escape');
    await page.until(() => document.querySelector<HTMLElement>('.detail')?.hidden);
  });

  it('is walked over with the keyboard', async () => {
    await open('#/nodes');
    await page.until(() => document.querySelectorAll('.heat-tile').length === 160);
    await page.run(() => document.querySelector<HTMLElement>('.heat-tile')?.focus());
    for (const key of ['ArrowRight', 'ArrowRight', 'ArrowDown', 'ArrowUp', 'ArrowRight']) await page.press(key);
    await page.press('Enter');
    await page.sees('edge-004', '.detail-title');
    await page.run(() => {
      location.hash = '#/sandboxes';
    });
    await page.until(() => document.querySelectorAll('.vt-row').length > 10);
    await page.press('/');
    await page.type('box-00009');
    await page.sees('box-00009', '.vt-row');
    await page.run(() => document.querySelector<HTMLElement>('.vt')?.focus());
    await page.press('ArrowDown');
    await page.press('Enter');
    await page.sees('box-00009.edge-010', '.sandbox-head h1');
  });

  it('holds ten thousand sandboxes with as many rows as are in sight', async () => {
    await open('#/sandboxes');
    await page.until(() => document.querySelectorAll('.vt-row').length > 10);
    const rows = () => page.run(() => document.querySelectorAll('.vt-row').length);
    expect(await rows()).toBeLessThan(60);
    // Names that mean harm are the youngest: they are in sight.
    await page.sees(HOSTILE, '.vt-body');
    await page.sees('\\u202egnp.exe', '.vt-body');
    expect(await page.run(() => document.querySelectorAll('.vt-body img, .vt-body script').length)).toBe(0);
    const last = await page.run(() => {
      const table = document.querySelector('.vt')!;
      table.scrollTop = table.scrollHeight;
      return table.getAttribute('aria-rowcount');
    });
    expect(Number(last)).toBe([...server.sandboxes.values()].filter(({ state }) => state !== 'ended').length + 1);
    await page.sees('box-0999', '.vt-body');
    expect(await rows()).toBeLessThan(60);
    await page.click('.state-button', 'paused');
    await page.until(() =>
      [...document.querySelectorAll('.vt-row:not([hidden]) .state')].every((one) => one.textContent === 'paused'),
    );
    expect(await page.run(() => location.hash)).toContain('state=paused');
    await page.click('.state-button', 'paused');
    await page.click('.state-button', 'ended');
    await page.until(() => document.querySelectorAll('.vt-row:not([hidden]) .state-off').length > 5);
  });

  it('shows what happens as it happens', async () => {
    await open('#/sandboxes');
    await page.until(() => document.querySelectorAll('.vt-row').length > 10);
    await page.sees('live', '.pulse');
    const made = {
      id: 'fresh.edge-007',
      name: 'fresh',
      edge: 'edge-007',
      state: 'running',
      createdAt: new Date().toISOString(),
    };
    server.sandboxes.set(made.id, made);
    server.tell('sandbox.created', { sandbox: made });
    await page.sees('fresh', '.vt-body');
    server.sandboxes.set(made.id, { ...made, state: 'paused' });
    // Without the whole of it: it is asked for.
    server.tell('sandbox.changed', { sandbox: made.id });
    await page.until(() =>
      [...document.querySelectorAll('.vt-row')].some((row) => /paused.*fresh/.test(row.textContent ?? '')),
    );
    server.tell('sandbox.gone', { sandbox: made.id });
    await page.until(
      () => ![...document.querySelectorAll('.vt-row:not([hidden])')].some((row) => row.textContent?.includes('fresh')),
    );
    server.nodes[4]!.alive = false;
    server.tell('node.down', { edge: 'edge-005' });
    await page.run(() => {
      location.hash = '#/nodes';
    });
    await page.sees('3 dead', '.summary');
  });

  it('tells of one sandbox, and pauses, resumes, stops and removes it', async () => {
    await open(`#/sandboxes/${BOX}`);
    await page.sees('8.8 / 10 GiB', '.meters');
    await page.sees('processor time');
    await page.click('.sandbox-head .button', 'Pause');
    await page.sees('paused', '.sandbox-head .state');
    await page.sees('nothing is measured');
    await page.click('.sandbox-head .button', 'Resume');
    await page.sees('running', '.sandbox-head .state');
    await page.click('.tab', 'Commands');
    await page.click('.command', 'echo');
    await page.sees('[12.1 KiB were dropped]', '.output');
    await page.sees('error: one test failed', '.output');
    await page.sees(HOSTILE, '.output');
    await page.sees('exit 2', '.output-head');
    await page.click('.tab', 'Network');
    await page.sees('169.254.169.254', '.vt-body');
    await page.sees(HOSTILE, '.rules');
    await page.click('.sandbox-head .button', 'Stop');
    await page.click('dialog .button', 'Cancel');
    await page.click('.sandbox-head .button', 'Stop');
    await page.click('dialog .button', 'Stop');
    await page.sees('ended', '.sandbox-head .state');
    await page.click('.sandbox-head .button', 'Remove');
    await page.click('dialog .button', 'Remove');
    await page.until(() => location.hash === '#/sandboxes');
    const changes = server.asked.map((one) => one.replace(/.*\//, '').replace(/.*\?/, '?'));
    expect(changes).toEqual(['pause', 'resume', 'stop', '?force=true']);
  });

  it('has a terminal: what is typed, Ctrl-C, pasted text, its size, a break of the connection', async () => {
    await open(`#/sandboxes/${BOX}?tab=terminal`);
    await page.sees('connected', '.terminal-bar');
    const shell = server.shells[0]!;
    await page.sees('made', '.xterm-rows');
    await page.type('echo hello');
    await page.press('Enter');
    await page.until(() => document.querySelector('.xterm-rows')?.textContent?.includes('$ echo hellohello'));
    await page.type('half');
    await page.press('c', 2);
    await page.sees('^C', '.xterm-rows');
    expect(shell.typed).toContain('half\x03');
    await page.insert('echo päste of several words');
    await page.press('Enter');
    await page.until(() =>
      /(päste of several words[^p]*){2}/.test(document.querySelector('.xterm-rows')?.textContent ?? ''),
    );
    const before = shell.size;
    await page.size(900, 600);
    await page.until(() => document.querySelectorAll('.xterm-rows > div').length < 30);
    await page.type('size');
    await page.press('Enter');
    await page.until(() => /size\d+x\d+/.test(document.querySelector('.xterm-rows')?.textContent ?? ''));
    expect(shell.size.columns).toBeLessThan(before.columns);
    expect(await page.run(() => document.querySelectorAll('.xterm-rows > div').length)).toBe(shell.size.rows);
    // What was written while nobody read is there once, and in its place.
    shell.breakConnections();
    shell.write('while away\r\n$ ');
    await page.sees('while away', '.xterm-rows');
    expect(await page.run(() => document.querySelector('.xterm-rows')?.textContent?.split('while away').length)).toBe(
      2,
    );
    await page.sees('connected', '.terminal-bar');
    // A tab in the background holds no connection, and loses nothing by it.
    await page.run(hide, true);
    await page.until(() => document.hidden);
    await until(() => server.listeners() === 0 && shell.readers === 0);
    shell.write('in the background\r\n$ ');
    await page.run(hide, false);
    await page.sees('in the background', '.xterm-rows');
    await until(() => server.listeners() === 1 && shell.readers === 1);
    await page.type('exit');
    await page.press('Enter');
    await page.sees('the shell exited with 0', '.terminal-bar');
    await page.click('.terminal-bar .button', 'New shell');
    await page.until(() => document.querySelector('.terminal-bar')?.textContent?.includes('connected'));
    expect(server.shells).toHaveLength(2);
    // Whoever leaves ends it.
    await page.click('.nav-link', 'Nodes');
    await page.until(() => document.querySelector('.heat') !== null);
    expect(server.shells[1]!.ended).toBe(true);
  });

  it('shows images, projects, denied attempts and the audit log', async () => {
    await open('#/images');
    await page.sees(`${HOSTILE}:1`, '.vt-body');
    await page.run((name) => {
      location.hash = `#/images/${encodeURIComponent(name)}`;
    }, `${HOSTILE}:1`);
    await page.sees('in 2 other images', '.layers');
    await page.until(() => document.querySelectorAll('.map-canvas').length === 3);
    const colours = await page.run(() => {
      const canvas = document.querySelector<HTMLCanvasElement>('.map-canvas')!;
      const { data } = canvas.getContext('2d')!.getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size;
    });
    expect(colours).toBeGreaterThanOrEqual(4);
    await page.click('.nav-link', 'Projects');
    await page.sees('research', '.projects');
    await page.sees('/ 15,000', '.projects');
    await page.click('.fold[aria-label="Projects below research"]');
    await page.until(() => !document.querySelector('.projects')?.textContent?.includes('swe'));
    await page.click('.nav-link', 'Denied');
    await page.sees('140.82.121.4', '.vt-body');
    await page.sees(HOSTILE, '.vt-body');
    await page.click('.nav-link', 'Audit');
    await page.sees('quota.admin', '.vt-body');
  });

  it('says what a token may not see', async () => {
    await open('#/audit', READER);
    await page.sees('takes the action audit.read');
  });

  it('has a dark and a light side, and text that can be read on both', async () => {
    await open('#/nodes');
    for (const place of [
      '#/nodes',
      '#/sandboxes',
      `#/sandboxes/${BOX}`,
      '#/images',
      '#/projects',
      '#/denied',
      '#/audit',
    ]) {
      await show(place);
      for (const theme of ['dark', 'light']) {
        await page.until((wanted) => {
          if (document.documentElement.dataset.theme === wanted) return true;
          document.querySelector<HTMLElement>('.top .icon-button')?.click();
          return false;
        }, theme);
        expect([place, theme, await page.run(poorContrast)]).toEqual([place, theme, []]);
      }
    }
  });

  it('fits a narrow window without scrolling sideways', async () => {
    await page.size(390, 800);
    await open('#/nodes');
    for (const place of [
      '#/nodes',
      '#/sandboxes',
      `#/sandboxes/${BOX}`,
      '#/images',
      '#/projects',
      '#/denied',
      '#/audit',
    ]) {
      await show(place);
      const wide = await page.run(() => {
        const main = document.querySelector('main')!;
        return [main.scrollWidth - main.clientWidth, document.documentElement.scrollWidth - innerWidth];
      });
      expect([place, ...wide]).toEqual([place, 0, 0]);
    }
  });
});

/** Runs in the page. */
function hide(hidden: boolean): void {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event('visibilitychange'));
}

async function until(holds: () => boolean): Promise<void> {
  const end = Date.now() + 60_000;
  while (!holds()) {
    if (Date.now() > end) throw new Error(`never true: ${holds}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** Texts whose contrast with what they stand on is below 4.5, as WCAG counts it. Runs in the page. */
function poorContrast(): string[] {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true })!;
  const rgba = (colour: string) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data] as [number, number, number, number];
  };
  const luminance = ([r, g, b]: readonly number[]) => {
    const linear = (v: number) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(r!) + 0.7152 * linear(g!) + 0.0722 * linear(b!);
  };
  const groundOf = (element: Element): readonly number[] => {
    for (let at: Element | null = element; at !== null; at = at.parentElement) {
      const style = getComputedStyle(at);
      const colour = rgba(style.backgroundColor);
      if (style.backgroundImage !== 'none' && colour[3] < 255) continue;
      if (colour[3] === 255) return colour;
    }
    return rgba(getComputedStyle(document.body).backgroundColor);
  };
  const poor = new Set<string>();
  for (const element of document.querySelectorAll<HTMLElement>('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent?.trim());
    if (!own || element.offsetParent === null || element.closest('svg, canvas, [hidden], .sr, .xterm')) continue;
    const a = luminance(rgba(getComputedStyle(element).color));
    const b = luminance(groundOf(element));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5)
      poor.add(`${element.className || element.tagName} ${element.textContent?.slice(0, 20)}: ${contrast.toFixed(2)}`);
  }
  return [...poor];
}
