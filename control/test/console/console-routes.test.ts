/** What is served under /console/, and with which headers. */
import fastify, { type FastifyInstance } from 'fastify';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { consoleRoutes } from '../../console/console-routes.ts';

describe('the files of the console', () => {
  let app: FastifyInstance;
  beforeAll(async () => {
    app = fastify();
    consoleRoutes(app);
    await app.ready();
  });
  afterAll(() => app.close());

  it('are served with a policy that allows no script and no style but files', async () => {
    const page = await app.inject('/console/');
    expect(page.statusCode).toBe(200);
    expect(page.headers['content-type']).toBe('text/html; charset=utf-8');
    const policy = String(page.headers['content-security-policy']);
    expect(policy).toContain("default-src 'none'");
    expect(policy.replace("img-src 'self' data:", '')).not.toMatch(/unsafe|https?:|\*|data:/);
    expect(page.headers['x-content-type-options']).toBe('nosniff');
    // Nor does the page need any: whoever adds some finds it refused.
    expect(page.body).not.toMatch(/<style|style=|<script(?![^>]*src=)|\son\w+=/i);
  });

  it('that the page and its modules name are all there', async () => {
    const page = await app.inject('/console/');
    const seen = new Set<string>();
    const next = [...page.body.matchAll(/(?:href|src)="([^"]+)"/g)].map(([, path]) => path!);
    while (next.length > 0) {
      const path = next.pop()!;
      if (seen.has(path)) continue;
      seen.add(path);
      const answer = await app.inject(`/console/${path}`);
      expect([path, answer.statusCode]).toEqual([path, 200]);
      if (!path.endsWith('.js')) continue;
      for (const [, other] of answer.body.matchAll(/ from '(\.[^']+)'/g)) {
        next.push(new URL(other!, `http://x/${path}`).pathname.slice(1));
      }
    }
    expect(seen.size).toBeGreaterThan(40);
    expect((await app.inject('/console/vendor/xterm.mjs')).headers['content-type']).toBe(
      'text/javascript; charset=utf-8',
    );
  });

  it('are answered with 304 while they are the same', async () => {
    const first = await app.inject('/console/main.js');
    const again = await app.inject({
      url: '/console/main.js',
      headers: { 'if-none-match': String(first.headers.etag) },
    });
    expect([again.statusCode, again.body]).toEqual([304, '']);
    expect(again.headers['content-security-policy']).toBe(first.headers['content-security-policy']);
  });

  it.each([
    '/console/../package.json',
    '/console/%2e%2e/console-routes.ts',
    '/console/..%2f..%2fpackage.json',
    '/console/tsconfig.json',
    '/console/vendor/xterm.js',
    '/console/__proto__',
  ])('%s is none of them', async (url) => {
    const answer = await app.inject(url);
    expect(answer.statusCode).toBe(404);
    expect(answer.body).not.toContain('dependencies');
  });

  it('/console leads to /console/', async () => {
    const answer = await app.inject('/console');
    expect([answer.statusCode, answer.headers.location]).toEqual([308, '/console/']);
  });
});
