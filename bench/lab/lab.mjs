/**
 * Runs a command in the lab: another kernel under QEMU (KVM where it works, else emulation) that sees this machine's files read-only,
 * changes in memory, and a scratch ext4 disk at /lab (TMPDIR is there). Output comes as it is written, the exit status at the end.
 */
import { spawn, spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { archiveOf, initrdOf } from './initrd.mjs';
import { LabUnavailable, labCache, labKernel, must } from './kernel.mjs';

/** An instruction a nanosecond. */
const COUNTED_KHZ = 1_000_000;
/** Nested, some hosts refuse to have this register set. */
const KVM_PROCESSOR = 'host,-arch-capabilities';

/**
 * @typedef {object} LabOptions
 * @property {string} [cwd] In the lab, too.
 * @property {number} [memoryMiB]
 * @property {number} [processors]
 * @property {number} [scratchMiB] Of the disk at /lab; takes what is written to it.
 * @property {number} [timeoutMs] Then the lab is switched off, and the status is 124.
 * @property {boolean} [emulate] Without KVM even where it works.
 * @property {boolean} [count] Emulated, with a clock that counts instructions: each takes 1 ns, of whatever processor, and nobody's load is in it.
 * @property {string} [series] Of its kernel; else $DSEC_LAB_KERNEL, else 6.12.
 * @property {readonly string[]} [kernelArguments]
 * @property {readonly string[]} [qemuArguments]
 * @property {AbortSignal} [signal]
 * @property {(chunk: Buffer) => void} [onOutput] Default: to stdout.
 */

/**
 * @param {string} command For /bin/sh.
 * @param {LabOptions} [options]
 * @returns {Promise<number>} Its exit status.
 * @throws LabUnavailable where there can be no lab; Error when it ends without a status (the end of its console is in the message)
 */
export async function runInLab(command, options = {}) {
  const kernel = labKernel(options.series ?? process.env.DSEC_LAB_KERNEL);
  const initrd = initrdOf(kernel);
  const kvm = options.emulate !== true && options.count !== true && kvmWorks();
  const folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  try {
    const scratch = join(folder, 'scratch.ext4');
    writeFileSync(scratch, '');
    truncateSync(scratch, (options.scratchMiB ?? 4096) * 2 ** 20);
    must('mkfs.ext4', ['-q', '-F', '-E', 'lazy_itable_init=1,lazy_journal_init=1', scratch]);
    const extra = join(folder, 'extra');
    mkdirSync(extra);
    const cwd = options.cwd ?? process.cwd();
    writeFileSync(join(extra, 'labcmd'), `cd ${quoted(cwd)} 2>/dev/null || cd /\n${command}\n`);
    writeFileSync(join(folder, 'initrd'), Buffer.concat([readFileSync(initrd), archiveOf(extra)]));
    return await boot({ kernel, kvm, folder, scratch, options });
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

/**
 * @param {{ kernel: import('./kernel.mjs').LabKernel, kvm: boolean, folder: string, scratch: string, options: LabOptions }} lab
 * @returns {Promise<number>}
 */
async function boot({ kernel, kvm, folder, scratch, options }) {
  const {
    memoryMiB = 2048,
    processors = 2,
    timeoutMs = 15 * 60_000,
    kernelArguments = [],
    qemuArguments = [],
  } = options;
  const words = [
    'console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr',
    // Emulated, the kernel cannot measure its clock.
    ...(kvm ? [] : [`tsc=reliable tsc_early_khz=${options.count ? COUNTED_KHZ : clockKhz()} no_timer_check`]),
    `lab.modules=${kernel.base}/lib/modules/${kernel.version}`,
    ...kernelArguments,
  ];
  const console = join(folder, 'console');
  const status = join(folder, 'status');
  const args = [
    ...['-nodefaults', '-no-user-config', '-display', 'none', '-no-reboot', '-M', 'q35'],
    ...(kvm ? ['-accel', 'kvm'] : ['-accel', `tcg,thread=${options.count ? 'single' : 'multi'},tb-size=512`]),
    ...(options.count ? ['-icount', 'shift=0,sleep=off'] : []),
    ...['-cpu', kvm ? KVM_PROCESSOR : 'max', '-smp', String(processors), '-m', String(memoryMiB)],
    ...['-kernel', kernel.image, '-initrd', join(folder, 'initrd'), '-append', words.join(' ')],
    ...['-serial', `file:${console}`, '-device', 'virtio-serial-pci'],
    ...['-chardev', 'stdio,id=out,signal=off', '-device', 'virtserialport,chardev=out,name=lab.out'],
    ...['-chardev', `file,id=status,path=${status}`, '-device', 'virtserialport,chardev=status,name=lab.status'],
    ...['-fsdev', 'local,id=root,path=/,security_model=none,readonly=on,multidevs=remap'],
    ...['-device', 'virtio-9p-pci,fsdev=root,mount_tag=hostroot'],
    ...['-drive', `file=${scratch},if=none,id=scratch,format=raw,cache=unsafe,discard=unmap`],
    ...['-device', 'virtio-blk-pci,drive=scratch'],
    ...qemuArguments,
  ];
  // The end of its input would tell the guest that nobody reads its output either.
  const qemu = spawn('qemu-system-x86_64', args, { stdio: ['pipe', 'pipe', 'pipe'] });
  let complaints = '';
  qemu.stderr.setEncoding('utf8').on('data', (text) => {
    complaints = (complaints + text).slice(-4000);
  });
  qemu.stdout.on('data', options.onOutput ?? ((chunk) => process.stdout.write(chunk)));
  const stop = () => qemu.kill('SIGKILL');
  let late = false;
  const timer = setTimeout(() => {
    late = true;
    stop();
  }, timeoutMs);
  options.signal?.addEventListener('abort', stop);
  // A lab does not outlive whoever asked for it.
  process.once('exit', stop);
  const ended = await new Promise((done) => {
    qemu.once('error', (error) => done(error.message));
    qemu.once('close', (code, signal) => done(signal ?? code));
  });
  clearTimeout(timer);
  process.off('exit', stop);
  options.signal?.removeEventListener('abort', stop);
  const text = textOf(status).replace(/\D/g, '');
  if (text !== '') return Number(text);
  if (late) {
    process.stderr.write(`lab: switched off after ${timeoutMs / 1000} s\n`);
    return 124;
  }
  options.signal?.throwIfAborted();
  throw new Error(`the lab ended without a status (qemu: ${ended})\n${complaints}${textOf(console).slice(-4000)}`);
}

/** A boot sector that writes 16 to port 0x501: QEMU’s debug device makes exit status 33 of it. */
const PROBE_CODE = [0xba, 0x01, 0x05, 0xb0, 0x10, 0xee, 0xf4, 0xeb, 0xfd];
const PROBE_MS = 10_000;

/**
 * Whether a machine under KVM runs: tried, since on many virtual machines /dev/kvm is there, makes a machine, and then nothing in it
 * ever moves. The answer is kept until the next boot. Without the processor's own support it is not tried: what KVM does without runs a
 * boot sector, and stops at the first instruction of a kernel that it does not know.
 */
export function kvmWorks() {
  if (!/^flags\s*:.* (vmx|svm)( |$)/m.test(textOf('/proc/cpuinfo'))) return false;
  const kept = join(labCache, `kvm-${textOf('/proc/sys/kernel/random/boot_id').trim()}`);
  const known = textOf(kept);
  if (known !== '') return known === 'yes';
  const folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
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
    const works = spawnSync('qemu-system-x86_64', args, { timeout: PROBE_MS, killSignal: 'SIGKILL' }).status === 33;
    writeFileSync(kept, works ? 'yes' : 'no');
    return works;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

function clockKhz() {
  const mhz = /^cpu MHz\s*:\s*([\d.]+)/m.exec(textOf('/proc/cpuinfo'))?.[1];
  return Math.round(Number(mhz ?? 2000) * 1000);
}

/** @param {string} path */
function textOf(path) {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}

/** For /bin/sh. @param {string} text */
export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

export { LabUnavailable };
