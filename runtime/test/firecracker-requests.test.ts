/**
 * What Firecracker is asked for, held against the fields of its API: our table of them always, its published description where $FIRECRACKER_API is
 * the path of it (src/firecracker/swagger/firecracker.yaml of its sources).
 */
import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import {
  type ApiRequest,
  balloonRequest,
  checkSpec,
  deviceRequests,
  driveRateRequest,
  loadRequest,
  pauseRequest,
  placedFiles,
  powerButton,
  resumeRequest,
  snapshotRequest,
  startRequests,
} from '../vm/firecracker/requests.ts';
import { flawOf, parseFirecrackerVersion, RECOMMENDED_FIRECRACKER } from '../vm/firecracker/version.ts';
import type { VmDrive, VmSpec } from '../vm/vm-driver.ts';
import { FIRECRACKER_FIELDS, type Field, patternOf, problemsOf } from './firecracker-fields.ts';

const base: VmDrive = { id: 'base-0', source: { file: '/layers/base' }, readOnly: true, transport: 'pmem' };
const tools: VmDrive = { ...base, id: 'tools-1', source: { file: '/layers/tools' }, transport: 'blk' };
const upper: VmDrive = {
  id: 'upper',
  source: { file: '/disks/upper' },
  readOnly: false,
  transport: 'blk',
  limit: { bytesPerSecond: 10e6, operationsPerSecond: 500 },
};
const spec: VmSpec = {
  id: 'work.1',
  folder: '/state/vm',
  boot: { kernel: '/kernels/vmlinux', initrd: '/kernels/initrd', commandLine: 'console=ttyS0 quiet' },
  cpus: 2,
  memoryBytes: 512 * 2 ** 20,
  memoryFile: '/dev/shm/work.1',
  drives: [base, tools, upper],
  network: {
    tap: 'tap7',
    mac: '06:00:ac:10:00:02',
    receive: { bytesPerSecond: 1e6 },
    send: { operationsPerSecond: 9 },
  },
  ports: [{ name: 'agent', socket: '/state/vm/agent.sock' }],
  balloon: { freePageReporting: true },
};

const everything: readonly ApiRequest[] = [
  ...startRequests(spec),
  ...startRequests({ ...spec, drives: [], network: undefined, ports: [], balloon: undefined }),
  loadRequest(spec, 'files', 'files/memory'),
  loadRequest({ ...spec, network: undefined }, 'files', 'files/memory'),
  snapshotRequest('snapshot', false),
  snapshotRequest('snapshot', true),
  pauseRequest,
  resumeRequest,
  powerButton,
  balloonRequest(64),
  driveRateRequest(upper, undefined),
  driveRateRequest(upper, { bytesPerSecond: 1 }),
  driveRateRequest(base, { operationsPerSecond: 5 }),
];

describe('requests to Firecracker', () => {
  it('have the fields of its API, with values of their types', () => {
    for (const { method, path, body } of everything) {
      const pattern = patternOf(method, path);
      const fields = FIRECRACKER_FIELDS[pattern];
      expect(fields, pattern).toBeDefined();
      expect(problemsOf(body, fields!), `${method} ${path}`).toEqual([]);
    }
    const asked = new Set(everything.map(({ method, path }) => patternOf(method, path)));
    expect(asked).toEqual(new Set(Object.keys(FIRECRACKER_FIELDS)));
  });

  it('come in an order in which devices have their places, and the start is last', () => {
    expect(startRequests(spec).map(({ method, path }) => `${method} ${path}`)).toEqual([
      'PUT /machine-config',
      'PUT /boot-source',
      'PUT /pmem/base_0',
      'PUT /drives/tools_1',
      'PUT /drives/upper',
      'PUT /network-interfaces/eth0',
      'PUT /vsock',
      'PUT /balloon',
      'PUT /entropy',
      'PUT /actions',
    ]);
  });

  it('say what the spec says', () => {
    const bodies = Object.fromEntries(deviceRequests(spec).map(({ path, body }) => [path, body]));
    expect(bodies).toEqual({
      '/machine-config': { vcpu_count: 2, mem_size_mib: 512, smt: false, track_dirty_pages: true },
      '/boot-source': {
        kernel_image_path: 'files/kernel',
        initrd_path: 'files/initrd',
        boot_args: 'console=ttyS0 quiet reboot=k panic=1',
      },
      '/pmem/base_0': { id: 'base_0', path_on_host: 'files/drive-base-0', read_only: true },
      '/drives/tools_1': {
        drive_id: 'tools_1',
        path_on_host: 'files/drive-tools-1',
        is_root_device: false,
        is_read_only: true,
        cache_type: 'Unsafe',
      },
      '/drives/upper': {
        drive_id: 'upper',
        path_on_host: 'files/drive-upper',
        is_root_device: false,
        is_read_only: false,
        cache_type: 'Writeback',
        rate_limiter: { bandwidth: { size: 10e6, refill_time: 1000 }, ops: { size: 500, refill_time: 1000 } },
      },
      '/network-interfaces/eth0': {
        iface_id: 'eth0',
        host_dev_name: 'tap7',
        guest_mac: '06:00:ac:10:00:02',
        rx_rate_limiter: { bandwidth: { size: 1e6, refill_time: 1000 } },
        tx_rate_limiter: { ops: { size: 9, refill_time: 1000 } },
      },
      '/vsock': { guest_cid: 3, uds_path: 'v.sock' },
      '/balloon': { amount_mib: 0, deflate_on_oom: true, free_page_reporting: true },
      '/entropy': {},
    });
    expect(loadRequest(spec, 'files', 'files/memory').body).toEqual({
      snapshot_path: 'files/state',
      mem_backend: { backend_type: 'File', backend_path: 'files/memory' },
      track_dirty_pages: true,
      resume_vm: false,
      network_overrides: [{ iface_id: 'eth0', host_dev_name: 'tap7' }],
    });
    expect(placedFiles(spec)).toEqual([
      { name: 'kernel', source: '/kernels/vmlinux', readOnly: true },
      { name: 'initrd', source: '/kernels/initrd', readOnly: true },
      { name: 'drive-base-0', source: '/layers/base', readOnly: true },
      { name: 'drive-tools-1', source: '/layers/tools', readOnly: true },
      { name: 'drive-upper', source: '/disks/upper', readOnly: false },
    ]);
  });

  it.each<[string, Partial<VmSpec>, string]>([
    ['no processors', { cpus: 0 }, 'cpus'],
    ['more than it takes', { cpus: 33 }, 'cpus'],
    ['odd memory', { memoryBytes: 3 * 2 ** 20 }, 'multiple of 2 MiB'],
    ['firmware', { boot: { firmware: 'uefi' } }, 'boot from firmware'],
    ['a screen', { display: { width: 800, height: 600 } }, 'a screen'],
    ['an NBD drive', { drives: [{ ...upper, source: { nbd: '/x' } }] }, 'NBD'],
    ['qcow2', { drives: [{ ...upper, source: { file: '/x', format: 'qcow2' } }] }, 'qcow2'],
    ['writable pmem', { drives: [{ ...base, readOnly: false }] }, 'pmem is read-only'],
    ['an id that leads out', { drives: [{ ...base, id: '../x' }] }, 'is no id'],
    ['the same drive twice', { drives: [base, base] }, 'twice'],
    [
      'many ports',
      {
        ports: [
          { name: 'a', socket: '' },
          { name: 'b', socket: '' },
        ],
      },
      'ports',
    ],
  ])('are not made of %s', (_name, change, message) => {
    expect(() => checkSpec({ ...spec, ...change })).toThrow(message);
  });
});

describe('versions of Firecracker', () => {
  it.each([
    ['1.13.1', 'virtio-pmem'],
    ['1.14.3', '5762'],
    ['1.15.0', '5762'],
    ['1.16.0', '5969'],
    ['1.16.1', '6100'],
    ['1.16.7', '6100'],
    ['2.0.0', 'not known'],
  ])('%s is refused', (version, reason) => {
    expect(flawOf(parseFirecrackerVersion(`Firecracker v${version}`)!)).toContain(reason);
  });

  it.each(['1.14.4', '1.15.1', '1.15.9', '1.17.0', '1.20.3', RECOMMENDED_FIRECRACKER])('%s is taken', (version) => {
    expect(flawOf(parseFirecrackerVersion(`Firecracker v${version}`)!)).toBeUndefined();
  });

  it('are read from what it prints', () => {
    const printed = 'Firecracker v1.15.1\n\n2026-01-01T00:00:00 [anonymous-instance:main] exiting. exit_code=0\n';
    expect(parseFirecrackerVersion(printed)).toEqual({ major: 1, minor: 15, patch: 1 });
    expect(parseFirecrackerVersion('1.17.0-dev')).toEqual({ major: 1, minor: 17, patch: 0 });
    for (const text of ['', 'Firecracker', 'v1.15', 'command not found']) {
      expect(parseFirecrackerVersion(text)).toBeUndefined();
    }
  });
});

const description = process.env.FIRECRACKER_API;
if (description === undefined) {
  console.log('skipped: requests against Firecracker’s own description; $FIRECRACKER_API is not set');
}

describe.skipIf(description === undefined)('the table of fields', () => {
  interface Schema {
    readonly $ref?: string;
    readonly type?: string;
    readonly properties?: Readonly<Record<string, Schema>>;
    readonly required?: readonly string[];
    readonly enum?: readonly string[];
    readonly schema?: Schema;
    readonly in?: string;
  }
  interface Description {
    readonly paths: Readonly<Record<string, Readonly<Record<string, { readonly parameters?: readonly Schema[] }>>>>;
    readonly definitions: Readonly<Record<string, Schema>>;
  }

  it('is what Firecracker’s description says', async () => {
    const { parse } = await import('yaml');
    const api = parse(readFileSync(description!, 'utf8')) as Description;
    const resolve = (schema: Schema): Schema =>
      schema.$ref === undefined ? schema : api.definitions[schema.$ref.replace('#/definitions/', '')]!;
    const compare = (fields: Readonly<Record<string, Field>>, schema: Schema, at: string) => {
      const { properties = {}, required = [] } = resolve(schema);
      for (const name of required) expect(fields[name]?.required, `${at}.${name}`).toBe(true);
      for (const [name, field] of Object.entries(fields)) {
        const there = properties[name];
        expect(there, `${at}.${name}`).toBeDefined();
        const found = resolve(there!);
        if (typeof field.type === 'object') compare(field.type, there!, `${at}.${name}`);
        else expect(found.type, `${at}.${name}`).toBe(field.type);
        expect(required.includes(name), `${at}.${name}`).toBe(field.required === true);
        if (field.values !== undefined) expect([...found.enum!].sort()).toEqual([...field.values].sort());
      }
    };
    for (const [request, fields] of Object.entries(FIRECRACKER_FIELDS)) {
      const [method, path] = request.split(' ') as [string, string];
      const body = api.paths[path]?.[method.toLowerCase()]?.parameters?.find((one) => one.in === 'body');
      expect(body, request).toBeDefined();
      compare(fields, body!.schema!, request);
    }
  });
});
