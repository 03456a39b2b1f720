/** Our tar reader against tar-stream's, on one tar of real source files in memory, pushed in pieces as inflate gives them. */
import { spawnSync } from 'node:child_process';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { extract } from 'tar-stream';
import { TarReader } from '#converter';
import { projectRoot } from '../dsec-command.ts';
import { measure, type Speed } from './measure.ts';

const PIECE = 256 << 10;
const PACKAGES = ['undici', 'commander', 'vite', 'pino', 'tar-stream'];

export async function tarParsing(): Promise<Speed[]> {
  const { stdout } = spawnSync(
    'tar',
    ['-cf', '-', '--format=gnu', '-C', join(projectRoot(), 'node_modules'), ...PACKAGES],
    {
      maxBuffer: 1 << 28,
    },
  );
  const pieces: Buffer[] = [];
  for (let at = 0; at < stdout.length; at += PIECE) pieces.push(stdout.subarray(at, at + PIECE));
  const seen = { ours: 0, theirs: 0 };
  const speeds = await measure(`tar parsing, ${(stdout.length / 1e6).toFixed(1)} MB`, [
    {
      name: 'TarReader',
      bytes: stdout.length,
      run() {
        seen.ours = 0;
        const reader = new TarReader({
          entry: () => {},
          data: (bytes) => {
            seen.ours += bytes.length;
          },
          hole: () => {},
          fileEnd: () => {},
        });
        for (const piece of pieces) reader.push(piece);
        reader.end();
      },
    },
    {
      name: 'tar-stream',
      bytes: stdout.length,
      async run() {
        seen.theirs = 0;
        const out = extract();
        out.on('entry', (_header, stream, next) => {
          stream.on('data', (bytes) => {
            seen.theirs += (bytes as Buffer).length;
          });
          stream.on('end', () => next());
        });
        const ended = new Promise<void>((done, failed) => {
          out.on('finish', () => done());
          out.on('error', failed);
        });
        Readable.from(pieces).pipe(out);
        await ended;
      },
    },
  ]);
  if (seen.ours !== seen.theirs) throw new Error(`${seen.ours} bytes of file data against ${seen.theirs}`);
  return speeds;
}
