/** `dsec main-job`: what `npm start` shows. */
import { runMainJob } from '../../main-job/main-job.ts';
import type { CommandDefinition } from '../command.ts';

export const definition: CommandDefinition = {
  description:
    'Shows the whole line once: makes OCI images out of what this machine has (or takes the one you name), converts them, runs commands in a sandbox on top ' +
    'of them, packs what was changed into a new image, runs and verifies that one. It works in a temporary store, and nothing of it stays. `npm start` runs it.',
  examples: [
    { line: 'sudo dsec main-job', what: 'with images made of busybox, Node and git' },
    {
      line: 'sudo dsec main-job docker://docker.io/library/debian:12 --json',
      what: 'with any image; the last line is JSON',
    },
  ],
  json: 'an object as the last line: `image`, `files`, `bytesIn`, `bytesStored`, `bytesRead`, `timeToFirstOutputMs`, `packDiff`, `verified`',
  configure(command, { output, progress, signal, defer }) {
    command
      .argument('[source]', 'docker://…, oci:…, oci-archive:…, docker-archive:…, tar:… or dir:…')
      .option('--json', 'end with the figures as one line of JSON')
      .action(async (source: string | undefined, options: { json?: boolean }) => {
        const result = await runMainJob(source, { signal, progress, defer, say: (line) => output.line(line) });
        if (options.json) await output.json(result);
      });
  },
};
