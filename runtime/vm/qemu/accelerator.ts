/**
 * Whether machines run under KVM here or are emulated (TCG). Tried, since on many virtual machines /dev/kvm is there, makes a machine, and then
 * nothing in it moves, or now and then. Without the processor's own support it is not tried at all. The answer is kept for as long as this process lives.
 */
import { spawnSync } from 'node:child_process';
import { accessSync, constants, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';

export type Accelerator = 'kvm' | 'tcg';

/** Nested, some hosts refuse to have this register set. */
export const KVM_PROCESSOR = 'host,-arch-capabilities';

/** A boot sector that writes 16 to port 0x501: QEMU’s debug device makes exit status 33 of it. */
const PROBE_CODE = [0xba, 0x01, 0x05, 0xb0, 0x10, 0xee, 0xf4, 0xeb, 0xfd];
const PROBE_MS = 5_000;

let known: Accelerator | undefined;

/** $DSEC_VM_ACCELERATOR (kvm, tcg) says so without trying. */
export function accelerator(program: string): Accelerator {
  const wish = process.env.DSEC_VM_ACCELERATOR;
  if (wish === 'kvm' || wish === 'tcg') return wish;
  known ??= hasProcessorSupport() && canOpenKvm() && kvmWorks(program) ? 'kvm' : 'tcg';
  return known;
}

/** $DSEC_QEMU, else qemu-system-x86_64 of PATH; undefined: there is none. */
export function findQemu(): string | undefined {
  const given = process.env.DSEC_QEMU;
  if (given === undefined || given === '') return onPath('qemu-system-x86_64');
  return canRun(given) ? given : undefined;
}

export function onPath(program: string): string | undefined {
  const folders = (process.env.PATH ?? '').split(delimiter);
  return folders.map((folder) => join(folder, program)).find(canRun);
}

function canRun(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/**
 * What an emulated guest's kernel has to be told about its clock, which it cannot measure; part of its command line. Nothing under KVM.
 */
export function clockArguments(way: Accelerator): string {
  if (way === 'kvm') return '';
  const mhz = /^cpu MHz\s*:\s*([\d.]+)/m.exec(readFileSync('/proc/cpuinfo', 'latin1'))?.[1];
  return `tsc=reliable tsc_early_khz=${Math.round(Number(mhz ?? 2000) * 1000)} no_timer_check`;
}

function hasProcessorSupport(): boolean {
  return /^flags\s*:.* (vmx|svm)( |$)/m.test(readFileSync('/proc/cpuinfo', 'latin1'));
}

function canOpenKvm(): boolean {
  try {
    accessSync('/dev/kvm', constants.R_OK | constants.W_OK);
    return true;
  } catch {
    return false;
  }
}

function kvmWorks(program: string): boolean {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-kvm-'));
  try {
    const sector = Buffer.alloc(512);
    sector.set(PROBE_CODE);
    sector.writeUInt16LE(0xaa55, 510);
    const disk = join(folder, 'probe');
    writeFileSync(disk, sector);
    const args = [
      ...['-nodefaults', '-no-user-config', '-display', 'none', '-no-reboot', '-M', 'pc', '-m', '16', '-accel', 'kvm'],
      ...['-cpu', KVM_PROCESSOR, '-device', 'isa-debug-exit,iobase=0x501,iosize=1'],
      ...['-drive', `file=${disk},if=ide,format=raw,readonly=off`],
    ];
    return spawnSync(program, args, { timeout: PROBE_MS, killSignal: 'SIGKILL' }).status === 33;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}
