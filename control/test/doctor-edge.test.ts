/** `dsec doctor --edge`: what makes a machine fit to run code of others, and what each row asks for. */
import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { edgeRows } from '../doctor/edge.ts';

describe('dsec doctor --edge', () => {
  let root: string;
  beforeEach(() => {
    root = mkdtempSync(join(tmpdir(), 'dsec-doctor-'));
  });
  afterEach(() => rmSync(root, { recursive: true, force: true }));
  const write = (path: string, text: string, mode = 0o644) => {
    const file = join(root, path);
    mkdirSync(dirname(file), { recursive: true });
    writeFileSync(file, `${text}\n`);
    chmodSync(file, mode);
  };
  const row = async (name: string) => (await edgeRows(root)).find((one) => one.name === name);

  it.each([
    ['core', true],
    ['/dev/null', true],
    ['|/bin/false', true],
    ['|/usr/share/apport/apport %p', false],
    ['|/usr/lib/systemd/systemd-coredump %P', false],
  ])('core pattern %s: %s', async (pattern, ok) => {
    write('proc/sys/kernel/core_pattern', pattern);
    expect(await row('kernel.core_pattern')).toMatchObject({ ok, severity: 'must', found: pattern });
  });

  it('compares settings, and leaves out those that the kernel has not', async () => {
    write('proc/sys/kernel/kptr_restrict', '0');
    write('proc/sys/kernel/pid_max', '4194304');
    expect(await row('kernel.kptr_restrict')).toMatchObject({
      ok: false,
      found: '0',
      remedy: expect.stringContaining('sysctl -w kernel.kptr_restrict=1'),
    });
    expect(await row('kernel.pid_max')).toMatchObject({ ok: true });
    expect(await row('kernel.dmesg_restrict')).toBeUndefined();
  });

  it('looks at files, swap, limits and clocks', async () => {
    write('proc/kpagecgroup', '', 0o444);
    write('proc/swaps', 'Filename Type Size Used Priority\n/dev/zram0 partition 8388604 0 100');
    write(
      'proc/self/limits',
      'Limit Soft Hard Units\nMax open files            1024                 4096                 files',
    );
    write('proc/self/cgroup', '0::/system.slice/dsec.service');
    write('sys/fs/cgroup/system.slice/dsec.service/pids.max', '512');
    write('proc/12/comm', 'chronyd');
    write('sys/devices/system/cpu/vulnerabilities/mds', 'Vulnerable: no microcode');
    write('sys/devices/system/cpu/vulnerabilities/l1tf', 'Not affected');
    expect(await row('/proc/kpagecgroup')).toMatchObject({ ok: false, remedy: 'chmod 0400 /proc/kpagecgroup' });
    expect(await row('swap')).toMatchObject({ ok: true, found: '8192 MiB' });
    expect(await row('PSI')).toMatchObject({ ok: false });
    expect(await row('open files')).toMatchObject({ ok: false, found: '1024, up to 4096' });
    expect(await row('tasks')).toMatchObject({ ok: false, found: '512' });
    expect(await row('time')).toMatchObject({ ok: true, found: 'chronyd' });
    expect(await row('processor mitigations')).toMatchObject({ ok: false, found: 'open: mds' });
  });

  it('says of every row why, and what to do', async () => {
    for (const one of await edgeRows()) {
      expect(one.why.length).toBeGreaterThan(10);
      if (!one.ok) expect(one.remedy.length).toBeGreaterThan(10);
    }
  });
});
