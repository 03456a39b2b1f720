/** The upper of a real sandbox, over real EROFS layers, as the layer that pack-diff makes of it. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Entry } from '#converter';
import { openLowerView, readUpper } from '#imagesvc';
import { busybox, canRun, Site } from './sandbox-fixture.ts';

describe.skipIf(!canRun())('the upper of a sandbox', () => {
  let site: Site;
  beforeAll(async () => {
    site = await new Site().open();
  });
  afterAll(() => site.remove());

  it('tells deletions, and opaque marks only where they hide something', async () => {
    const base = await site.image('bb:1', [
      busybox,
      (folder) => {
        fs.mkdirSync(join(folder, 'srv/data/sub'), { recursive: true });
        fs.writeFileSync(join(folder, 'srv/data/old'), 'old');
        fs.symlinkSync('srv', join(folder, 'link'));
        fs.writeFileSync(join(folder, 'pipe'), 'a file');
      },
    ]);
    const script = `set -e; cd /; mkdir -p opt/tool; echo 1 > opt/tool/x
      rm -r srv/data; mkdir srv/data; echo 2 > srv/data/new
      rm link; mkdir -p link/data; rm bin/tty; rm pipe; mkfifo pipe
      mkdir tmp; echo 3 > tmp/scratch; ln opt/tool/x opt/y`;
    const ran = await site.run(base, ['/bin/sh', '-c', script], { keep: true, name: 'packed', env: ['PATH=/bin'] });
    expect([ran.stderr, ran.exitCode]).toEqual(['', 0]);
    const view = await openLowerView(site.store, base.name, base.layers);
    const told: string[] = [];
    const handler = {
      entry: ({ kind, path, target }: Entry) => void told.push(`${kind} ${path}${target && ` -> ${target}`}`),
      data() {},
      hole() {},
      fileEnd() {},
    };
    const { notes, skipped } = await readUpper(ran.upper!, handler, { lower: view.at });
    await view.close();
    expect(told).toEqual([
      'dir .',
      'dir bin',
      'whiteout bin/tty',
      'dir link',
      'dir link/data',
      'dir opt',
      'dir opt/tool',
      'file opt/tool/x',
      'hardlink opt/y -> opt/tool/x',
      'whiteout pipe',
      'dir srv',
      'dir srv/data',
      'opaque srv/data',
      'file srv/data/new',
      'dir tmp',
    ]);
    expect([notes, skipped]).toEqual([['pipe pipe left out'], ['tmp/scratch']]);
  });
});
