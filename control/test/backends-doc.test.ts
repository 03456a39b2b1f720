/** docs/backends.md is the table of backends as it is. `UPDATE_DOCS=1 npx vitest run control/test/backends-doc.test.ts` writes it anew. */
import { readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { expect, test } from 'vitest';
import { BACKEND_TABLE, BACKENDS, type Support } from '#runtime';

const PAGE = fileURLToPath(new URL('../../docs/backends.md', import.meta.url));
const SAID: Readonly<Record<string, string>> = {
  true: 'yes',
  false: '',
  task: 'in a task',
  agent: 'with a guest agent',
};

function page(): string {
  const cell = (support: Support) => SAID[String(support)]!;
  return [
    '# Backends',
    '',
    'One program runs against four backends; what differs is what they cost, how far they are apart from each other, and how much of a system they are:',
    '',
    '| | what it is | image | starts in |',
    '| --- | --- | --- | --- |',
    '| [`fncall`](fncall.md) | a short task in a container that is there already | container image | milliseconds |',
    '| [`container`](sandboxes.md) | namespaces and control groups of this machine | container image | tens of milliseconds |',
    '| [`microvm`](microvm.md) | a kernel of its own, from the same layers | container image | seconds where it is emulated, less under KVM |',
    '| [`vm`](vm.md) | a whole machine, any operating system | a disk | as long as that boots |',
    '',
    '## What each can do',
    '',
    'An empty cell is refused before anything is done: error `RUNTIME_UNSUPPORTED` (HTTP 501, exit 5; `UnsupportedError` in the libraries), which names the',
    'backend and the word of the first column. `dsec run` and `crun` and `runc` (`--runtime`) are containers.',
    '',
    `| capability | | ${BACKENDS.join(' | ')} |`,
    `| --- | --- | ${BACKENDS.map(() => '---').join(' | ')} |`,
    ...Object.entries(BACKEND_TABLE).map(([capability, row]) => {
      return `| \`${capability}\` | ${row.title} | ${BACKENDS.map((backend) => cell(row[backend])).join(' | ')} |`;
    }),
    '',
    '- In a task: it is part of the task itself (program, files, limits, result), not of something that stays. A command as a task is',
    '  `{"language": "command", "args": ["program", "argument"]}`.',
    "- With a guest agent: where QEMU's guest agent runs in the machine ([vm.md](vm.md)).",
    '- The table is `runtime/sandbox-api/backend-table.ts`; `runtime/test/conformance-backends.test.ts` asks for every cell of it.',
    '',
    '## The same call',
    '',
    'In both libraries (`control/sdk/backend-scenarios.json` is run by both, on all backends):',
    '',
    '```python',
    'for backend in ("container", "microvm"):',
    '    async with await client.run(backend, DSecMicroVMRunArgs(image="alpine:3.20", memory_limit_mb=256)) as sandbox:',
    '        print((await sandbox.run_shell("uname -r")).stdout)',
    '```',
    '',
    '```ts',
    "for (const backend of ['container', 'microvm'] as const) {",
    "  await using sandbox = await client.run(backend, { image: 'alpine:3.20', memoryLimitMb: 256 });",
    "  console.log((await sandbox.runShell('uname -r')).stdout);",
    '}',
    '```',
    '',
    'On the command line it is `--backend`:',
    '',
    '```sh',
    'dsec sandbox create alpine:3.20 --name one --backend microvm',
    'dsec sandbox exec one -- uname -r',
    '```',
    '',
  ].join('\n');
}

test('docs/backends.md holds the table of backends', () => {
  const expected = page();
  if (process.env.UPDATE_DOCS) writeFileSync(PAGE, expected);
  expect(readFileSync(PAGE, 'utf8')).toBe(expected);
});
