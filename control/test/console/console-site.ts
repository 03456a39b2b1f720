/** A browser in front of `dsec serve all`, for the whole of a test file. */
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { afterAll, beforeAll } from 'vitest';
import { canServeEdge, EdgeSite, until } from '../edge-site.ts';
import { Chromium, findChromium, type Page } from './chromium.ts';

const START_MS = 400_000;

/** Why this machine cannot; empty where it can. */
export function consoleSiteMissing(): string {
  if (!canServeEdge) return 'not root, or no dsec-agent, or no busybox';
  return findChromium() === undefined ? 'no Chromium' : '';
}

/** What is there from the first test on: the cluster is up and the page is empty. */
export interface ConsoleSite {
  readonly page: Page;
  /** Of the API, without a path. */
  readonly url: string;
  readonly token: string;
  /** As its administrator. */
  api(method: string, path: string, body?: object): Promise<{ readonly status: number; readonly text: string }>;
}

/** Made before the tests of this file and ended after them. `prepare` comes before the cluster starts. */
export function consoleSite(prepare: (site: EdgeSite) => void = () => {}): ConsoleSite {
  let site: EdgeSite;
  let cluster: ReturnType<EdgeSite['serve']>;
  let browser: Chromium;
  let page: Page;
  let url = '';
  let token = '';

  beforeAll(async () => {
    site = await EdgeSite.make();
    prepare(site);
    const pressed = ['--pressure', 'cpu=1,memory=1,io=1', '--reserve', 'memory=0,disk=0'];
    const args = ['--listen', '127.0.0.1:0', '--id', 'edge-1', '--no-context', '--stop-sandboxes'];
    cluster = site.serve('all', ...args, ...pressed);
    await until('the cluster serves', () => {
      if (cluster.child.exitCode !== null) throw new Error(`the cluster did not start: ${cluster.said()}`);
      return /sudo cat \S+/.test(cluster.said());
    });
    url = /^console: (\S+)\/console\//m.exec(cluster.said())![1]!;
    token = readFileSync(/sudo cat (\S+)/.exec(cluster.said())![1]!, 'utf8').trim();
    browser = await Chromium.start(findChromium()!);
    page = await browser.page();
  }, START_MS);

  afterAll(async () => {
    await browser?.end();
    if (cluster !== undefined && cluster.child.exitCode === null) {
      cluster.child.kill('SIGTERM');
      await once(cluster.child, 'exit');
    }
    await site?.remove();
  }, START_MS);

  return {
    get page() {
      return page;
    },
    get url() {
      return url;
    },
    get token() {
      return token;
    },
    async api(method, path, body) {
      const headers = { authorization: `Bearer ${token}`, ...(body && { 'content-type': 'application/json' }) };
      const answer = await fetch(`${url}${path}`, { method, headers, body: body && JSON.stringify(body) });
      return { status: answer.status, text: await answer.text() };
    },
  };
}
