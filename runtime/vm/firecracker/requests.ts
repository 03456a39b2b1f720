/**
 * What Firecracker is asked for, made of a machine's spec and nothing else: the requests in their order, with the bodies that its API description has.
 *
 * Paths are relative, to the root of the jail or to the machine's folder: `files/NAME`, sockets and snapshots. So a snapshot can be restored
 * in another folder although it remembers them.
 */
import { fail } from '../../errors.ts';
import type { RateLimit, VmDrive, VmSpec } from '../vm-driver.ts';
import { GUEST_CID } from './vsock.ts';

export interface ApiRequest {
  readonly method: 'GET' | 'PUT' | 'PATCH';
  readonly path: string;
  readonly body?: object;
}

const MIB = 2 ** 20;
const MAX_CPUS = 32;
export const API_SOCKET = 'api.sock';
export const VSOCK = 'v.sock';
export const SNAPSHOT_STATE = 'state';
export const SNAPSHOT_MEMORY = 'memory';
const INTERFACE = 'eth0';
/** A reset is how a guest says that it is done: Firecracker ends then. A kernel that has panicked does so too. */
const KERNEL_ARGUMENTS = 'reboot=k panic=1';

/** A file of this machine under the name that Firecracker knows it by. */
export interface PlacedFile {
  readonly name: string;
  readonly source: string;
  readonly readOnly: boolean;
  /** By this process, which must not wait for it. */
  readonly isServed?: boolean;
}

/** @throws VM_SPEC, VM_UNSUPPORTED: what Firecracker does not have */
export function checkSpec(spec: VmSpec): void {
  const bad = (field: string, problem: string) => fail('VM_SPEC', { id: spec.id, field, problem });
  const lacks = (what: string) => fail('VM_UNSUPPORTED', { driver: 'firecracker', what });
  if (!Number.isInteger(spec.cpus) || spec.cpus < 1 || spec.cpus > MAX_CPUS) {
    throw bad('cpus', `${spec.cpus} is not 1 to ${MAX_CPUS}`);
  }
  if (!Number.isInteger(spec.memoryBytes / (2 * MIB)) || spec.memoryBytes <= 0) {
    throw bad('memoryBytes', `${spec.memoryBytes} is no multiple of 2 MiB`);
  }
  if ('firmware' in spec.boot) throw lacks('boot from firmware');
  if (spec.display !== undefined) throw lacks('a screen');
  if ((spec.ports?.length ?? 0) > 1) throw lacks('ports beside the agent’s');
  const ids = new Set<string>();
  for (const drive of spec.drives) {
    if (!/^[A-Za-z0-9-]{1,20}$/.test(drive.id)) throw bad('drives', `${JSON.stringify(drive.id)} is no id`);
    if (ids.has(drive.id)) throw bad('drives', `${drive.id} is there twice`);
    ids.add(drive.id);
    if ('nbd' in drive.source) throw lacks('drives from an NBD server');
    if (drive.source.format === 'qcow2') throw lacks('qcow2');
    if (drive.transport === 'pmem' && !drive.readOnly) throw bad('drives', `${drive.id}: pmem is read-only`);
  }
}

/** What Firecracker has to find under `files/`. */
export function placedFiles(spec: VmSpec): PlacedFile[] {
  const files: PlacedFile[] = [];
  if ('kernel' in spec.boot) {
    files.push({ name: 'kernel', source: spec.boot.kernel, readOnly: true });
    if (spec.boot.initrd !== undefined) files.push({ name: 'initrd', source: spec.boot.initrd, readOnly: true });
  }
  for (const drive of spec.drives) {
    if (!('file' in drive.source)) continue;
    const { file: source, isServed } = drive.source;
    files.push({ name: driveFile(drive), source, readOnly: drive.readOnly, isServed });
  }
  return files;
}

/** From nothing to a machine that runs, in this order: devices get their places in the guest by it. */
export function startRequests(spec: VmSpec): ApiRequest[] {
  return [...deviceRequests(spec), { method: 'PUT', path: '/actions', body: { action_type: 'InstanceStart' } }];
}

/** All before the start. */
export function deviceRequests(spec: VmSpec): ApiRequest[] {
  const put = (path: string, body: object): ApiRequest => ({ method: 'PUT', path, body });
  const requests: ApiRequest[] = [
    put('/machine-config', {
      vcpu_count: spec.cpus,
      mem_size_mib: spec.memoryBytes / MIB,
      smt: false,
      track_dirty_pages: true,
    }),
  ];
  if ('kernel' in spec.boot) {
    requests.push(
      put('/boot-source', {
        kernel_image_path: inside('kernel'),
        boot_args: `${spec.boot.commandLine} ${KERNEL_ARGUMENTS}`.trim(),
        ...(spec.boot.initrd === undefined ? {} : { initrd_path: inside('initrd') }),
      }),
    );
  }
  for (const drive of spec.drives) requests.push(driveRequest(drive));
  if (spec.network !== undefined) {
    const { tap, mac, receive, send } = spec.network;
    requests.push(
      put(`/network-interfaces/${INTERFACE}`, {
        iface_id: INTERFACE,
        host_dev_name: tap,
        guest_mac: mac,
        ...named('rx_rate_limiter', rateLimiter(receive)),
        ...named('tx_rate_limiter', rateLimiter(send)),
      }),
    );
  }
  if ((spec.ports?.length ?? 0) > 0) requests.push(put('/vsock', { guest_cid: GUEST_CID, uds_path: VSOCK }));
  if (spec.balloon !== undefined) {
    requests.push(
      put('/balloon', {
        amount_mib: 0,
        deflate_on_oom: true,
        free_page_reporting: spec.balloon.freePageReporting,
      }),
    );
  }
  requests.push(put('/entropy', {}));
  return requests;
}

/** In a Firecracker that has been asked for nothing else. The machine stands still. */
export function loadRequest(spec: VmSpec, folder: string, memory: string): ApiRequest {
  return {
    method: 'PUT',
    path: '/snapshot/load',
    body: {
      snapshot_path: `${folder}/${SNAPSHOT_STATE}`,
      mem_backend: { backend_type: 'File', backend_path: memory },
      track_dirty_pages: true,
      resume_vm: false,
      ...named(
        'network_overrides',
        spec.network === undefined ? undefined : [{ iface_id: INTERFACE, host_dev_name: spec.network.tap }],
      ),
    },
  };
}

/** Of a machine that stands still. `differential`: pages that were written since the last one. */
export function snapshotRequest(folder: string, differential: boolean): ApiRequest {
  return {
    method: 'PUT',
    path: '/snapshot/create',
    body: {
      snapshot_type: differential ? 'Diff' : 'Full',
      snapshot_path: `${folder}/${SNAPSHOT_STATE}`,
      mem_file_path: `${folder}/${SNAPSHOT_MEMORY}`,
    },
  };
}

export const pauseRequest: ApiRequest = { method: 'PATCH', path: '/vm', body: { state: 'Paused' } };
export const resumeRequest: ApiRequest = { method: 'PATCH', path: '/vm', body: { state: 'Resumed' } };
export const powerButton: ApiRequest = { method: 'PUT', path: '/actions', body: { action_type: 'SendCtrlAltDel' } };
export const describeRequest: ApiRequest = { method: 'GET', path: '/' };

export function balloonRequest(amountMiB: number): ApiRequest {
  return { method: 'PATCH', path: '/balloon', body: { amount_mib: amountMiB } };
}

/** Of a machine that runs. Undefined lifts the limit. */
export function driveRateRequest(drive: VmDrive, limit: RateLimit | undefined): ApiRequest {
  const id = apiId(drive);
  const body = { rate_limiter: rateLimiter(limit) ?? NO_LIMIT };
  return drive.transport === 'pmem'
    ? { method: 'PATCH', path: `/pmem/${id}`, body: { id, ...body } }
    : { method: 'PATCH', path: `/drives/${id}`, body: { drive_id: id, ...body } };
}

function driveRequest(drive: VmDrive): ApiRequest {
  const id = apiId(drive);
  const path = inside(driveFile(drive));
  const limit = named('rate_limiter', rateLimiter(drive.limit));
  if (drive.transport === 'pmem') {
    // Reads of it are the guest's own, by its page tables: there is nothing to limit in those.
    return { method: 'PUT', path: `/pmem/${id}`, body: { id, path_on_host: path, read_only: true } };
  }
  return {
    method: 'PUT',
    path: `/drives/${id}`,
    body: {
      drive_id: id,
      path_on_host: path,
      is_root_device: false,
      is_read_only: drive.readOnly,
      // A flush of the guest's is one of the disk.
      cache_type: drive.readOnly ? 'Unsafe' : 'Writeback',
      ...limit,
    },
  };
}

/** A bucket that is full at the start and again after a second. */
export function rateLimiter(limit: RateLimit | undefined): object | undefined {
  if (limit === undefined) return undefined;
  const bucket = (size: number | undefined) =>
    size === undefined ? undefined : { size: Math.max(1, Math.floor(size)), refill_time: 1000 };
  const limiter = {
    ...named('bandwidth', bucket(limit.bytesPerSecond)),
    ...named('ops', bucket(limit.operationsPerSecond)),
  };
  return Object.keys(limiter).length === 0 ? undefined : limiter;
}

/** Buckets without size are none. */
const NO_LIMIT = { bandwidth: { size: 0, refill_time: 0 }, ops: { size: 0, refill_time: 0 } };

function named(name: string, value: unknown): Record<string, unknown> {
  return value === undefined ? {} : { [name]: value };
}

export function inside(name: string): string {
  return `files/${name}`;
}

function driveFile(drive: VmDrive): string {
  return `drive-${drive.id}`;
}

/** Its ids have letters, digits and `_`. */
function apiId(drive: VmDrive): string {
  return drive.id.replaceAll('-', '_');
}
