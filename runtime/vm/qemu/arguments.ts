/**
 * The command line of a machine, made of nothing but its spec: no default devices, no configuration of this machine, a system call filter around
 * the process. Devices are given as JSON, so that no path can be read as an option.
 *
 * `microvm` (devices on virtio-mmio) boots a kernel fastest; PCI of q35 is for what microvm lacks: pmem, firmware, a screen. The same spec makes the
 * same machine, always: a snapshot is resumed by it.
 */
import { statSync } from 'node:fs';
import { join } from 'node:path';
import { fail } from '../../errors.ts';
import type { VmDrive, VmSpec } from '../vm-driver.ts';
import { type Accelerator, KVM_PROCESSOR } from './accelerator.ts';

export const MIB = 1024 * 1024;
const PMEM_STEP = 2 * MIB;
/** Cache of translated code, which the machine holds until it ends: TCG's default is a gigabyte. To boot fills more than this, to run Python fits; with 16 it takes twice as long. */
const TRANSLATION_MIB = 32;
const MAX_ID = 20;
/** Room for memory devices that a machine with late ones has, whatever comes: where its guest finds things follows from it. */
export const LATE_PMEM_BYTES = 64 * 2 ** 30;
/** A day: a disk whose server is away stands still, as one on a machine that is being mended would; an error would cost the guest its file system. */
const RECONNECT_SECONDS = 86_400;

/** Of a machine that waits for the state of a snapshot. */
export interface Incoming {
  /** Instead of the memory file of the spec: pages of it are copied when written. */
  readonly privateMemory?: string;
}

export interface MachineSockets {
  readonly monitor: string;
  readonly console: string;
  readonly vnc: string;
  readonly migration: string;
}

export function machineSockets(folder: string): MachineSockets {
  return {
    monitor: join(folder, 'qmp.sock'),
    console: join(folder, 'console.sock'),
    vnc: join(folder, 'vnc.sock'),
    migration: join(folder, 'state.sock'),
  };
}

/** UEFI: code that all share, and where the machine's own variables are copied from. */
export const OVMF = { code: '/usr/share/OVMF/OVMF_CODE_4M.fd', variables: '/usr/share/OVMF/OVMF_VARS_4M.fd' };

export function machineKind(spec: VmSpec): 'microvm' | 'q35' {
  const needsPci =
    spec.lateDevices === true ||
    spec.generationId === true ||
    'firmware' in spec.boot ||
    spec.display !== undefined ||
    spec.drives.some(({ transport }) => transport === 'pmem');
  return needsPci ? 'q35' : 'microvm';
}

/** @throws VM_SPEC */
export function machineArguments(spec: VmSpec, way: Accelerator, incoming?: Incoming): string[] {
  checkSpec(spec);
  const kind = machineKind(spec);
  const sockets = machineSockets(spec.folder);
  const device = (driver: string, facts: object) => [
    '-device',
    JSON.stringify({ driver: `${driver}-${kind === 'q35' ? 'pci' : 'device'}`, ...facts }),
  ];
  const pmem = spec.drives.filter(({ transport }) => transport === 'pmem');
  const pmemBytes = pmem.map((drive) => pmemSize(spec, drive));
  const machine = kind === 'q35' ? 'q35,vmport=off,smm=off' : 'microvm,acpi=on,rtc=on,pit=on,pic=on';
  const memory = {
    'qom-type': 'memory-backend-file',
    id: 'ram',
    size: spec.memoryBytes,
    'mem-path': incoming?.privateMemory ?? spec.memoryFile,
    share: incoming?.privateMemory === undefined,
  };
  const size = `${spec.memoryBytes / MIB}M`;
  const placed = pmemBytes.reduce((sum, bytes) => sum + bytes, 0);
  const isLate = spec.lateDevices === true;
  if (isLate && placed > LATE_PMEM_BYTES) {
    throw fail('VM_SPEC', {
      id: spec.id,
      field: 'drives',
      problem: `${placed} bytes of pmem, beyond ${LATE_PMEM_BYTES}`,
    });
  }
  const most = spec.memoryBytes + (isLate ? LATE_PMEM_BYTES : placed);
  return [
    ...['-nodefaults', '-no-user-config', '-name', `dsec-${spec.id.replaceAll(',', '')}`, '-S'],
    ...['-sandbox', 'on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny'],
    ...['-M', `${machine},memory-backend=ram`],
    ...(way === 'kvm' ? ['-accel', 'kvm'] : ['-accel', `tcg,thread=multi,tb-size=${TRANSLATION_MIB}`]),
    ...['-cpu', way === 'kvm' ? KVM_PROCESSOR : 'max', '-smp', String(spec.cpus)],
    ...[
      '-m',
      most === spec.memoryBytes ? size : `size=${size},slots=${isLate ? 1 : pmem.length},maxmem=${most / MIB}M`,
    ],
    ...['-object', JSON.stringify(memory)],
    ...['-rtc', 'base=utc,clock=host'],
    ...socketDevice('qmp', sockets.monitor),
    ...['-mon', 'chardev=qmp,mode=control'],
    ...socketDevice('console', sockets.console),
    ...['-serial', 'chardev:console'],
    ...bootArguments(spec),
    ...device('virtio-serial', { id: 'ports' }),
    ...(spec.ports ?? []).flatMap(({ name, socket }, at) => [
      ...socketDevice(`port${at}`, socket),
      ...[
        '-device',
        JSON.stringify({ driver: 'virtserialport', bus: 'ports.0', chardev: `port${at}`, nr: at + 1, name }),
      ],
    ]),
    ...['-object', JSON.stringify({ 'qom-type': 'rng-builtin', id: 'entropy' })],
    ...device('virtio-rng', { id: 'rng', rng: 'entropy' }),
    ...(spec.generationId === true ? ['-device', JSON.stringify({ driver: 'vmgenid', guid: 'auto' })] : []),
    ...(spec.balloon === undefined
      ? []
      : device('virtio-balloon', { id: 'balloon', 'free-page-reporting': spec.balloon.freePageReporting })),
    ...pmem.flatMap((drive, at) => [
      ...['-object', JSON.stringify(pmemBackend(drive, pmemBytes[at]!))],
      ...device('virtio-pmem', { id: `pmem-${drive.id}`, memdev: `memory-${drive.id}` }),
    ]),
    ...spec.drives
      .filter(({ transport }) => transport === 'blk')
      .flatMap((drive, at) => [
        ...['-blockdev', JSON.stringify(blockNode(drive))],
        ...device('virtio-blk', {
          id: `blk-${drive.id}`,
          drive: `drive-${drive.id}`,
          serial: drive.id,
          ...(drive.bootable === true ? { bootindex: at + 1 } : {}),
        }),
      ]),
    ...(spec.network === undefined
      ? []
      : [
          ...['-netdev', JSON.stringify({ type: 'tap', id: 'net', ifname: spec.network.tap, ...NO_SCRIPTS })],
          ...device('virtio-net', { id: 'nic', netdev: 'net', mac: spec.network.mac, ...noBootRom(kind) }),
        ]),
    ...displayArguments(spec, sockets),
    ...(incoming === undefined ? [] : ['-incoming', 'defer']),
  ];
}

const NO_SCRIPTS = { script: 'no', downscript: 'no', vhost: false };

function noBootRom(kind: 'microvm' | 'q35'): object {
  return kind === 'q35' ? { romfile: '' } : {};
}

function socketDevice(id: string, path: string): string[] {
  return ['-chardev', `socket,id=${id},path=${path.replaceAll(',', ',,')},server=on,wait=off`];
}

function bootArguments({ boot, folder }: VmSpec): string[] {
  // A kernel that we chose ends with its machine; what boots from a disk may start over.
  if ('kernel' in boot) {
    const initrd = boot.initrd === undefined ? [] : ['-initrd', boot.initrd];
    return ['-no-reboot', '-kernel', boot.kernel, ...initrd, '-append', boot.commandLine];
  }
  if (boot.firmware === 'bios') return [];
  const flash = (file: string, unit: number, readOnly: boolean) => [
    '-drive',
    `if=pflash,format=raw,unit=${unit},readonly=${readOnly ? 'on' : 'off'},file=${file.replaceAll(',', ',,')}`,
  ];
  return [...flash(OVMF.code, 0, true), ...flash(firmwareVariables(folder), 1, false)];
}

export function firmwareVariables(folder: string): string {
  return join(folder, 'uefi-variables.fd');
}

function displayArguments({ display }: VmSpec, { vnc }: MachineSockets): string[] {
  if (display === undefined) return ['-display', 'none'];
  const { width, height } = display;
  return [
    ...['-vnc', `unix:${vnc}`],
    // With VGA in it, so that firmware and boot loaders have a screen too.
    ...['-device', JSON.stringify({ driver: 'virtio-vga', id: 'screen', xres: width, yres: height })],
    ...['-device', JSON.stringify({ driver: 'qemu-xhci', id: 'usb' })],
    ...['-device', JSON.stringify({ driver: 'usb-tablet', id: 'tablet', bus: 'usb.0' })],
  ];
}

function blockNode({ id, source, readOnly }: VmDrive): object {
  const common = { 'node-name': `drive-${id}`, 'read-only': readOnly, discard: 'unmap' };
  if ('nbd' in source) {
    // Its server may be replaced while we run.
    const server = { type: 'unix', path: source.nbd };
    return { driver: 'nbd', server, export: source.export ?? '', 'reconnect-delay': RECONNECT_SECONDS, ...common };
  }
  return { driver: source.format ?? 'raw', file: { driver: 'file', filename: source.file }, ...common };
}

function pmemBackend({ id, source }: VmDrive, size: number): object {
  const path = 'file' in source ? source.file : '';
  const backend = { 'qom-type': 'memory-backend-file', id: `memory-${id}`, 'mem-path': path, size };
  return { ...backend, share: true, readonly: true };
}

function pmemSize({ id }: VmSpec, drive: VmDrive): number {
  const refuse = (problem: string) => fail('VM_SPEC', { id, field: `drive ${drive.id}`, problem });
  if (!('file' in drive.source) || !drive.readOnly) throw refuse('pmem is for read-only files');
  const { size } = statSync(drive.source.file);
  if (size === 0 || size % PMEM_STEP !== 0) throw refuse(`${size} bytes: pmem takes whole 2 MiB`);
  return size;
}

function checkSpec(spec: VmSpec): void {
  const refuse = (field: string, problem: string) => fail('VM_SPEC', { id: spec.id, field, problem });
  if (!/^[\w.-]{1,64}$/.test(spec.id)) throw refuse('id', 'letters, digits, ".", "_" and "-", at most 64');
  if (!Number.isInteger(spec.cpus) || spec.cpus < 1 || spec.cpus > 128) throw refuse('cpus', 'between 1 and 128');
  const { memoryBytes } = spec;
  if (!Number.isSafeInteger(memoryBytes) || memoryBytes < 32 * MIB || memoryBytes % (2 * MIB) !== 0) {
    throw refuse('memoryBytes', 'whole 2 MiB, at least 32 MiB');
  }
  const ids = spec.drives.map(({ id }) => id);
  for (const id of ids) {
    if (!/^[A-Za-z0-9-]+$/.test(id) || id.length > MAX_ID)
      throw refuse(`drive ${id}`, `letters, digits and "-", at most ${MAX_ID}`);
  }
  if (new Set(ids).size !== ids.length) throw refuse('drives', 'two have one id');
  for (const path of [
    ...Object.values(machineSockets(spec.folder)),
    ...(spec.ports ?? []).map(({ socket }) => socket),
  ]) {
    if (Buffer.byteLength(path) > 107) throw refuse('folder', `${path} is too long for a socket (107 bytes)`);
  }
}
