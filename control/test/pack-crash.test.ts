/** The service is killed at each step of an image being made of a sandbox that runs, and a client dies meanwhile: the sandbox runs on, and the image is there whole or not at all. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { canServe, ServiceSite } from './service-site.ts';

const STEPS = ['pack-frozen', 'pack-opened', 'pack-read', 'pack-published'] as const;

describe.skipIf(!canServe())('packing a sandbox that runs', { timeout: 600_000 }, () => {
  let site: ServiceSite;
  beforeAll(async () => {
    site = await ServiceSite.open({ name: 'pack', applets: ['sh', 'cat', 'echo', 'sleep', 'dd', 'rm', 'sync'] });
    expect(site.dsec('sandbox', 'create', 'bb:1', '--name', 'work').status).toBe(0);
    expect(inside('echo packed > /made; rm /bin/dd')).toMatchObject({ status: 0, stderr: '' });
    expect(site.dsec('sandbox', 'exec', '--detach', 'work', '--', 'sleep', '100000').status).toBe(0);
  }, 120_000);
  afterAll(() => site?.remove('work'), 120_000);

  const inside = (script: string) => site.dsec('sandbox', 'exec', '-n', 'work', '--', 'sh', '-c', script);
  const pack = (name: string) => site.dsec('pack-diff', 'work', '--name', name);
  const images = () =>
    (JSON.parse(site.dsec('images', '--json').stdout) as { name: string }[]).map(({ name }) => name).sort();
  const staged = () => {
    const folder = join(site.folder, 'store/tmp');
    return fs.existsSync(folder) ? fs.readdirSync(folder) : [];
  };

  it('goes on as if nothing had been, whichever step the service is killed at', async () => {
    const known = ['bb:1'];
    for (const step of STEPS) {
      await site.end();
      await site.serve({ DSEC_FAILPOINT: step });
      // What the one before has left.
      expect(inside('cat /made'), step).toMatchObject({ status: 0, stdout: 'packed\n' });
      expect(pack(`${step}:1`).status, step).not.toBe(0);
      expect(site.service?.signalCode ?? (await exitOf(site)), step).toBe('SIGKILL');
      if (step === 'pack-published') known.push(`${step}:1`);
      expect(images(), step).toEqual([...known].sort());
    }
    await site.end();
    await site.serve();
    const [work] = JSON.parse(site.dsec('sandbox', 'ls', '--json').stdout);
    expect(work).toMatchObject({ name: 'work', state: 'running' });
    const [sleeps] = (
      JSON.parse(site.dsec('sandbox', 'logs', 'work', '--json').stdout) as { args: string[]; running: boolean }[]
    ) //
      .filter(({ args }) => args[0] === 'sleep');
    expect(sleeps?.running).toBe(true);
    expect(pack('again:1')).toMatchObject({ status: 0 });
    for (const image of ['pack-published:1', 'again:1']) {
      expect(site.dsec('cat', image, '/made').stdout).toBe('packed\n');
      expect(site.dsec('ls', image, '/bin').stdout).not.toMatch(/\bdd\b/);
      expect(site.dsec('verify', image).status).toBe(0);
    }
    expect(site.dsec('gc').status).toBe(0);
    expect(staged()).toEqual([]);
  });

  it('goes on when the client that asked for it dies', async () => {
    expect(inside('i=0; while [ $i -lt 300 ]; do echo $i > /f$i; i=$((i+1)); done').status).toBe(0);
    const client = site.start(['pack-diff', 'work', '--name', 'left:1']);
    const ended = new Promise((resolve) => client.once('exit', resolve));
    // Node has to start first; wherever it is then, the sandbox goes on.
    await new Promise((resolve) => setTimeout(resolve, 500));
    client.kill('SIGKILL');
    await ended;
    expect(inside('cat /made')).toMatchObject({ status: 0, stdout: 'packed\n' });
    expect(pack('right:1').status).toBe(0);
    expect(site.dsec('cat', 'right:1', '/f299').stdout).toBe('299\n');
  });
});

function exitOf({ service }: ServiceSite): Promise<unknown> {
  return new Promise((resolve) => service!.once('exit', (_code, signal) => resolve(signal)));
}
