/**
 * A sandbox in a virtual machine under Firecracker, as far as its processors are needed: $DSEC_FIRECRACKER and $DSEC_JAILER, where they are set and there is a
 * /dev/kvm, else a stand-in that keeps Firecracker's rules. Its disks are devices of this host, served by the node; killed at any step, nothing is left.
 */
import { spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { mountsAt, readMountInfo } from '#linux';
import { reclaimSandboxes } from '../index.ts';
import { readRecord } from '../sandbox/sandbox-record.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import { FirecrackerApi } from '../vm/firecracker/api-client.ts';
import { rootOf } from '../vm/firecracker/jail.ts';
import { API_SOCKET } from '../vm/firecracker/requests.ts';
import { withDeviceNames } from '../vm/guest/device-names.ts';
import { findProcess, readMachineRecord } from '../vm/qemu/machine-process.ts';
import type { VmDrive } from '../vm/vm-driver.ts';
import { chooseVmDriver, sandboxVmDriver, useVmDriver } from '../vm/vm-drivers.ts';
import { vmPlaces } from '../vm/vm-places.ts';
import { microvmSupport } from '../vm/vm-support.ts';
import { type BundledChild, bundledChild } from './bundled-child.ts';
import { ResidentSite, until } from './resident-fixture.ts';
import { NOTHING } from './sandbox-fixture.ts';
import { canRunVms, SMALL_VM } from './vm-site.ts';

const drive = (id: string, transport: VmDrive['transport'] = 'blk'): VmDrive => ({
  id,
  transport,
  source: { file: '/f' },
  readOnly: true,
});

describe('drives whose guests know no serial numbers', () => {
  it('are named by their place among those of their kind', () => {
    const drives = [drive('l0', 'pmem'), ...Array.from({ length: 28 }, (_, at) => drive(`d${at}`))];
    const order = {
      layers: [
        { devices: ['pmem0'], dax: true },
        { devices: ['d0', 'd25'], dax: false },
      ],
      upper: 'd26',
      disks: [{ device: 'd27', kind: 'ext4', target: '/d' }],
    };
    expect(withDeviceNames(order, drives, false)).toEqual({
      layers: [
        { devices: ['pmem0'], dax: true },
        { devices: ['vda', 'vdz'], dax: false },
      ],
      upper: 'vdaa',
      disks: [{ device: 'vdab', kind: 'ext4', target: '/d' }],
    });
    expect(withDeviceNames(order, drives, true)).toBe(order);
  });
});

describe('the driver of sandboxes', () => {
  const before = { ...process.env };
  afterEach(() => {
    for (const name of ['DSEC_FIRECRACKER', 'DSEC_VM_DRIVER', 'DSEC_VM_ACCELERATOR']) {
      if (before[name] === undefined) delete process.env[name];
      else process.env[name] = before[name];
    }
    useVmDriver('auto');
  });

  it('is QEMU where there is no Firecracker, or KVM is not used, and says why', () => {
    process.env.DSEC_FIRECRACKER = '/nowhere/firecracker';
    useVmDriver('auto');
    expect(chooseVmDriver()).toEqual({ name: 'qemu', why: expect.stringContaining('no firecracker in PATH') });
    const state = fs.mkdtempSync(join(tmpdir(), 'dsec-'));
    useVmDriver('firecracker');
    expect(chooseVmDriver().name).toBe('firecracker');
    expect(() => sandboxVmDriver()).toThrow(/no firecracker in PATH/);
    // Without a kernel it does not come to that.
    expect(microvmSupport(state, { probe: false }).problem ?? '').not.toContain('qemu');
    fs.rmSync(state, { recursive: true });
  });
});

const root = process.getuid?.() === 0;
describe.skipIf(!root || !canRunVms() || !fs.existsSync('/dev/fuse'))(
  'a sandbox under Firecracker',
  { timeout: 600_000 },
  () => {
    const env = { ...process.env };
    const isReal = env.DSEC_FIRECRACKER !== undefined && fs.existsSync('/dev/kvm');
    if (!isReal) console.log('a stand-in: $DSEC_FIRECRACKER is not set, or there is no /dev/kvm');
    let scratch: string;
    let site: ResidentSite;
    let program: BundledChild;

    beforeAll(async () => {
      scratch = fs.mkdtempSync(join(tmpdir(), 'dsec-fcs-'));
      if (!isReal) standIn(scratch);
      process.env.DSEC_VM_ACCELERATOR = 'kvm';
      process.env.DSEC_VM_DRIVER = 'firecracker';
      site = await ResidentSite.open();
      program = bundledChild(new URL('./resident-child.ts', import.meta.url), {
        'file-watch': pathToFileURL(join(import.meta.dirname, '../..', 'ublk-daemon/target/file/watch-worker.ts')),
      });
    }, 120_000);
    beforeEach(() => useVmDriver('firecracker'));
    afterAll(async () => {
      program?.remove();
      await site?.remove();
      for (const name of ['DSEC_FIRECRACKER', 'DSEC_JAILER', 'DSEC_VM_ACCELERATOR', 'DSEC_VM_DRIVER']) {
        if (env[name] === undefined) delete process.env[name];
        else process.env[name] = env[name];
      }
      useVmDriver('auto');
      fs.rmSync(scratch, { recursive: true, force: true });
    }, 300_000);

    function leftNothing(): void {
      const { runDir } = site.site.folders;
      expect(readMountInfo().filter(({ mountPoint }) => String(mountPoint).startsWith(`${runDir}/vm`))).toEqual([]);
      expect(fs.existsSync(join(runDir, 'vm')) ? fs.readdirSync(join(runDir, 'vm')) : []).toEqual([]);
      expect(site.site.leftovers()).toEqual(NOTHING);
    }

    /** What Firecracker has, or was asked for. */
    async function configured(folder: string): Promise<Record<string, unknown>> {
      const api = new FirecrackerApi(join(rootOf(folder), API_SOCKET), 'test');
      return (await api.send({ method: 'GET', path: '/vm/config' })) as Record<string, unknown>;
    }

    async function begun(name: string, options = {}) {
      const { folders } = site.site;
      const creating = site.create({ ...SMALL_VM, name, ...options });
      creating.catch(() => {});
      let failed: unknown;
      creating.catch((error) => {
        failed = error;
      });
      let folder = '';
      await until('its machine runs', () => {
        if (failed !== undefined) throw failed;
        const id = readRecord(sandboxFolders(folders, name).record)?.id;
        folder = id === undefined ? '' : vmPlaces(folders.runDir, id).folder;
        return folder !== '' && site.node.list().some((one) => one.name === name);
      });
      return { creating, folder };
    }

    it('has its layers and its disks as drives, in the jail, and leaves nothing', async () => {
      const { creating, folder } = await begun('one', { dockerDiskBytes: 64 << 20 });
      const record = readMachineRecord(folder)!;
      const own = record.spec.drives.filter(({ readOnly }) => !readOnly);
      expect(own.map(({ id }) => id)).toEqual(['upper', 'docker']);
      for (const { source } of own) {
        const { file } = source as { file: string };
        if (file.startsWith('/dev/')) continue;
        expect(source).toMatchObject({ isServed: true });
        expect(mountsAt(file).length).toBe(1);
      }
      const inJail = readMountInfo().filter(({ mountPoint }) => String(mountPoint).startsWith(`${folder}/jail`));
      expect(inJail.length).toBe(record.spec.drives.length + 2);
      if (isReal) {
        const { drives, vsock } = (await configured(folder)) as {
          drives: { drive_id: string; is_read_only: boolean; path_on_host: string }[];
          vsock: { guest_cid: number };
        };
        expect(drives.map(({ drive_id }) => drive_id)).toEqual(
          record.spec.drives.map(({ id }) => id.replaceAll('-', '_')),
        );
        expect(vsock).toMatchObject({ guest_cid: 3, uds_path: 'v.sock' });
      }
      await site.node.remove('one', { force: true });
      await expect(creating).rejects.toMatchObject({ code: 'RUNTIME_START_FAILED' });
      leftNothing();
    });

    it('outlives the service, with its disks, and the next one has it', async () => {
      const { creating, folder } = await begun('two');
      const pid = findProcess(folder);
      const { file } = readMachineRecord(folder)!.spec.drives.at(-1)!.source as { file: string };
      await site.restart();
      // It was not ready: the next service undoes it.
      await reclaimSandboxes(site.site.folders);
      expect(pid).toBeGreaterThan(0);
      expect(findProcess(folder)).toBeUndefined();
      expect(mountsAt(file)).toEqual([]);
      creating.catch(() => {});
      leftNothing();
    });

    const STEPS = ['vm-disk-served', 'vm-recorded', 'vm-spawned', 'vm-started', 'create-launched'];
    it.each(STEPS)('killed at %s: nothing is left', async (point) => {
      await site.node.close();
      const { storeUrl, folders } = site.site;
      const order = JSON.stringify({ storeUrl, folders, image: 'busybox:1', name: 'one', options: SMALL_VM });
      const child = spawn(process.execPath, [program.path, order], {
        stdio: ['ignore', 'inherit', 'inherit'],
        env: { ...process.env, DSEC_FAILPOINT: point },
      });
      const signal = await new Promise((resolve) => child.once('exit', (_code, by) => resolve(by)));
      expect(signal).toBe('SIGKILL');
      await site.restart();
      await reclaimSandboxes(folders);
      expect(site.node.list()).toEqual([]);
      leftNothing();
    });
  },
);

/** A Firecracker and a jailer that do what those do, but for the machine and the jail. */
function standIn(scratch: string): void {
  const notes = join(scratch, 'notes');
  const config = join(scratch, 'config');
  fs.writeFileSync(notes, '');
  fs.writeFileSync(config, JSON.stringify({ notes, vsock: 'silent' }));
  const program = fileURLToPath(new URL('stand-in-firecracker.mjs', import.meta.url));
  const write = (name: string, text: string) => {
    fs.writeFileSync(join(scratch, name), `#!/bin/sh\n${text}`, { mode: 0o755 });
    return join(scratch, name);
  };
  process.env.DSEC_FIRECRACKER = write('firecracker', `exec ${process.execPath} ${program} --config ${config} "$@"\n`);
  process.env.DSEC_JAILER = write(
    'jailer',
    'while [ "$1" != -- ]; do case $1 in --exec-file) exec_file=$2 ;; --chroot-base-dir) base=$2 ;; --id) id=$2 ;; esac; shift 2; done; shift\n' +
      'cd "$base/$(basename "$exec_file")/$id/root" || exit 1\nexec "$exec_file" --id "$id" "$@"\n',
  );
}
