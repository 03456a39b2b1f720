/** Walls that the machine for development lacks: AppArmor, and user namespaces over layers that have to be mounted somewhere (before Linux 6.15). */
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { atLeast } from '#linux';
import { appArmor, sandboxProfile } from '../backend/apparmor.ts';
import { chooseBackend } from '../backend/choose-backend.ts';
import { usernsSupport } from '../backend/user-namespace.ts';
import { ResidentSite, say } from './resident-fixture.ts';
import { busybox, NOTHING, Site } from './sandbox-fixture.ts';

describe('a sandbox', { timeout: 600_000 }, () => {
  let site: Site;
  let image: Image;
  beforeAll(async () => {
    site = await new Site().open();
    image = await site.image('lab:1', [busybox, (folder) => busybox(folder)], { Env: ['PATH=/bin'] });
  }, 600_000);
  afterAll(() => site?.remove(), 600_000);
  const out = async (name: string, script: string) => {
    const backend = chooseBackend(site.folders.runDir, name);
    const ran = await site.run(image, ['sh', '-c', script], { backend, userns: 'private' });
    return ran.stdout.toString() + ran.stderr;
  };

  it('has a user namespace, by layers that are attached for a moment', async () => {
    expect(atLeast(6, 15)).toBe(false);
    expect(await usernsSupport(site.folders)).toEqual({ lacks: undefined });
    for (const name of ['dsec', 'crun']) {
      expect(
        await out(name, 'id -u; ls -ldn /bin | cut -d" " -f1; touch /made && stat -c "%u %g" /made /bin/busybox'),
      ).toBe('0\ndrwxr-xr-x\n0 0\n0 0\n');
    }
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('takes on the AppArmor profile', async () => {
    const { name } = sandboxProfile();
    expect(appArmor()).toEqual({ profile: name });
    for (const runtime of ['dsec', 'crun'])
      expect(await out(runtime, 'cat /proc/self/attr/current')).toBe(`${name} (enforce)\n`);
    const resident = await ResidentSite.open();
    const sandbox = await resident.create();
    expect(await say(sandbox, 'cat /proc/self/attr/current')).toBe(`${name} (enforce)\n`);
    // The agent ends it, and its children get signals.
    expect(await say(sandbox, 'sleep 1000 & kill $!; wait $!; echo $?')).toBe('143\n');
    expect((await sandbox.stop()).reason).toBe('stopped');
    await resident.remove();
  });
});
