/** The console in front of a real cluster: `dsec serve all`, a sandbox, a shell in it. */
import { describe, expect, it } from 'vitest';
import { consoleSite, consoleSiteMissing } from './console-site.ts';

const missing = consoleSiteMissing();
if (missing !== '') console.log(`skipped: ${missing}`);

describe.skipIf(missing !== '')('the console of dsec serve all', { timeout: 400_000 }, () => {
  const site = consoleSite();

  it('shows its node, a sandbox as it is made, and a shell that does what is typed', async () => {
    const { page, url, token } = site;
    await page.go(`${url}/console/`);
    await page.click('#token');
    await page.insert(token);
    await page.press('Enter');
    await page.sees('edge-1', '.heat');
    await page.sees('1of 1 up', '.summary');
    await page.click('.nav-link', 'Sandboxes');
    await page.sees('No sandbox fits');
    await page.sees('live', '.pulse');
    const asked = { image: 'bb:1', name: 'box', memoryBytes: 64 << 20, job: 'j1' };
    const made = await site.api('POST', '/v1/sandboxes', asked);
    expect(made.status, made.text).toBe(201);
    expect(JSON.parse(made.text).id).toBe('box.edge-1');
    await page.sees('box', '.vt-row');
    await page.click('.vt-row', 'box');
    await page.sees('/ 64 MiB', '.meters');
    await page.sees('bb:1', '.facts');
    await page.click('.tab', 'Terminal');
    await page.sees('connected', '.terminal-bar');
    const screen = '.xterm-rows';
    await page.until(() => /[#$] /.test(document.querySelector('.xterm-rows')?.textContent ?? ''));
    await page.type('echo $((6*7))-done');
    await page.press('Enter');
    await page.sees('42-done', screen);
    await page.type('sleep 1000');
    await page.press('Enter');
    await page.sees('sleep 1000', screen);
    await page.press('c', 2);
    await page.sees('^C', screen);
    await page.size(800, 500);
    await page.until(() => document.querySelectorAll('.xterm-rows > div').length < 25);
    await page.type('busybox stty size');
    await page.press('Enter');
    const rows = await page.run(() => document.querySelectorAll('.xterm-rows > div').length);
    await page.until(
      (n) => new RegExp(`(^|\\D)${n} \\d+`).test(document.querySelector('.xterm-rows')?.textContent ?? ''),
      rows,
    );
    await page.type('exit 3');
    await page.press('Enter');
    await page.sees('the shell exited with 3', '.terminal-bar');
    await page.click('.tab', 'Commands');
    await page.sees('exit 3', '.command-list');
  });

  it('stops and removes it, and has the rest of a cluster', async () => {
    const { page } = site;
    await page.click('.sandbox-head .button', 'Remove');
    await page.click('dialog .button', 'Remove');
    await page.until(() => location.hash === '#/sandboxes');
    await page.sees('No sandbox fits');
    await page.click('.nav-link', 'Images');
    await page.click('.vt-row', 'bb:1');
    await page.until(() => document.querySelectorAll('.layer').length === 1);
    await page.until(() => document.querySelectorAll('.map-canvas').length === 1);
    await page.click('.nav-link', 'Projects');
    await page.sees('root', '.projects');
    await page.click('.nav-link', 'Denied');
    await page.sees('Nothing was denied');
    await page.click('.nav-link', 'Audit');
    await page.sees('sandbox.create', '.vt-body');
    await page.click('.nav-link', 'Nodes');
    await page.click('.heat-tile');
    await page.click('.detail .button', 'Drain');
    await page.click('dialog .button-main');
    await page.sees('draining', '.detail-title');
    expect(page.complaints).toEqual([]);
  });
});
