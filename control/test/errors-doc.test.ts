/** docs/errors.md lists every row of every error table. `UPDATE_DOCS=1 npx vitest run control/test/errors-doc.test.ts` writes it anew. */
import { readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { expect, test } from 'vitest';
import type { ErrorRow } from '#base';
import { chunkCacheErrors } from '#chunk-cache';
import { converterErrors } from '#converter';
import { imagesvcErrors } from '#imagesvc';
import { linuxErrors } from '#linux';
import { runtimeErrors } from '#runtime';
import { ublkDaemonErrors } from '#ublk-daemon';
import { controlErrors } from '../errors.ts';

const TABLES: Record<string, Record<string, ErrorRow>> = {
  converter: converterErrors,
  imagesvc: imagesvcErrors,
  'chunk-cache': chunkCacheErrors,
  'ublk-daemon': ublkDaemonErrors,
  runtime: runtimeErrors,
  control: controlErrors,
  linux: linuxErrors,
};
const PAGE = fileURLToPath(new URL('../../docs/errors.md', import.meta.url));

function page(): string {
  const lines = [
    '# Errors',
    '',
    'Every error has a code that stays the same; texts may change. The command line prints message and hint and exits with the',
    'status below (`--json`: `{"error":{"code","message","hint"}}` on stderr); an API answers with the HTTP status. `retry`: the same',
    'call may succeed later with nothing changed.',
    '',
    'Errors of the operating system that no row covers (a full disk, say) have its code: `ENOSPC`, `EACCES`, ... Anything else is `BUG`,',
    'exit 1: a fault of dsec; DSEC_DEBUG=1 shows where.',
  ];
  for (const [folder, table] of Object.entries(TABLES)) {
    lines.push('', `## ${folder}/`, '', '| code | message | exit | HTTP | retry |', '| --- | --- | --- | --- | --- |');
    for (const [code, row] of Object.entries(table)) {
      lines.push(
        `| ${code} | ${row.message.replaceAll('|', '\\|')} | ${row.exit} | ${row.http} | ${row.retryable ? 'yes' : ''} |`,
      );
    }
  }
  return `${lines.join('\n')}\n`;
}

test('docs/errors.md holds every error as it is', () => {
  const expected = page();
  if (process.env.UPDATE_DOCS) writeFileSync(PAGE, expected);
  expect(readFileSync(PAGE, 'utf8')).toBe(expected);
});

test.each(Object.entries(TABLES))('the table of %s/ is in order', (_, table) => {
  const codes = Object.keys(table);
  expect(codes).toEqual([...codes].sort());
  for (const row of Object.values(table)) expect(row.exit).toBeGreaterThan(0);
});
