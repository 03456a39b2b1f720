/** docs/api-reference.md says what the API says of itself. `UPDATE_DOCS=1 npx vitest run control/test/api-reference.test.ts` writes it anew. */
import { readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { type ApiDocument, apiReference } from '../sdk/api-reference.ts';
import { ApiSite } from './api-site.ts';

const PAGE = fileURLToPath(new URL('../../docs/api-reference.md', import.meta.url));

describe('docs/api-reference.md', () => {
  let site: ApiSite;
  let document: ApiDocument;

  beforeAll(async () => {
    site = await ApiSite.make(0);
    document = (await (await site.ask('/openapi.json')).json()) as ApiDocument;
  });
  afterAll(() => site.remove());

  it('is what /openapi.json says', () => {
    const text = apiReference(document);
    if (process.env.UPDATE_DOCS === '1') writeFileSync(PAGE, text);
    expect(readFileSync(PAGE, 'utf8')).toBe(text);
  });

  it('has what the libraries call', () => {
    const sources = ['client', 'sandbox', 'command', 'shell', 'files', 'file-trees'].map((name) =>
      readFileSync(new URL(`../sdk/typescript/src/${name}.ts`, import.meta.url), 'utf8'),
    );
    const below = [...sources.join('\n').matchAll(/\$\{(?:this|files)\.path\}(\/[a-z/-]+)`/g)].map(([, path]) => path!);
    expect(below.length).toBeGreaterThan(25);
    const known = Object.keys(document.paths);
    for (const path of new Set(below))
      expect(
        known.some((one) => one.endsWith(path)),
        path,
      ).toBe(true);
  });
});
