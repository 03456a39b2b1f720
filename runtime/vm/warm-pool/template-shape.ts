/**
 * Which machines can be made of one template: those that differ in nothing but what comes after the guest has booted (drives, network, who they are). A
 * template's key is of all that its memory and state depend on: the machine as QEMU is told of it, and the kernel, the guest's archive, QEMU and
 * processor themselves. Whatever of that changes, the key does, and the template is nobody's any more.
 */
import { createHash } from 'node:crypto';
import { readFileSync, realpathSync, statSync } from 'node:fs';
import { basename } from 'node:path';
import { findQemu } from '../qemu/accelerator.ts';
import { machineArguments } from '../qemu/arguments.ts';
import type { VmSpec } from '../vm-driver.ts';
import type { SandboxVmDriver } from '../vm-drivers.ts';

/** Of what a template is, and how it is made. */
const FORMAT = 1;
/** For the guest's first process. */
export const SWITCHED_OFF = 'dsec.end=off';

export interface TemplateShape {
  /** Names it on the disk. */
  readonly key: string;
  /** Of what is the same for all templates of this moment: one of another world is of no use. */
  readonly world: string;
  readonly cpus: number;
  readonly memoryBytes: number;
  /** Its balloon reports free pages. */
  readonly reporting: boolean;
}

/** Of a machine as a sandbox has it: what comes later is left out. */
export function shapeOf(spec: VmSpec, driver: SandboxVmDriver): TemplateShape {
  const world = worldOf(spec, driver);
  const bare = bareSpec(spec, { id: 'template', folder: '/template', memoryFile: '/template/memory' });
  // What its clock is told is measured anew by each process.
  const clock = new Set(driver.clockArguments.split(' '));
  const boot = 'kernel' in spec.boot ? spec.boot : { kernel: '', commandLine: '' };
  const commandLine = boot.commandLine
    .split(' ')
    .filter((word) => !clock.has(word))
    .join(' ');
  const args = machineArguments(
    { ...bare, boot: { kernel: 'kernel', initrd: 'initrd', commandLine } },
    driver.features.accelerator,
  );
  return {
    key: digest([world, args]),
    world,
    cpus: spec.cpus,
    memoryBytes: spec.memoryBytes,
    reporting: spec.balloon?.freePageReporting === true,
  };
}

/** The same machine, as one that is made of a template. */
export function lateSpec(spec: VmSpec): VmSpec {
  const { boot } = spec;
  if (!('kernel' in boot)) return spec;
  // A machine with PCI can be switched off.
  const words = boot.commandLine.split(' ').filter((word) => word !== '' && word !== SWITCHED_OFF);
  return { ...spec, boot: { ...boot, commandLine: [...words, SWITCHED_OFF].join(' ') }, lateDevices: true };
}

/** The machine before anything has come. */
export function bareSpec(spec: VmSpec, own: Pick<VmSpec, 'id' | 'folder' | 'memoryFile'>): VmSpec {
  const ports = (spec.ports ?? []).map(({ name }) => ({ name, socket: `${own.folder}/agent.sock` }));
  return { ...spec, ...own, ports, drives: [], lateDevices: true, network: undefined, cgroups: undefined };
}

function worldOf({ boot }: VmSpec, { features }: SandboxVmDriver): string {
  const kernel = 'kernel' in boot ? boot.kernel : '';
  const initrd = ('kernel' in boot ? boot.initrd : undefined) ?? '';
  // The archive's name has the digest of what it holds.
  return digest([
    FORMAT,
    fileOf(kernel),
    basename(initrd),
    fileOf(findQemu() ?? ''),
    features.accelerator,
    processor(),
  ]);
}

/** As it would differ were it another one. */
function fileOf(path: string): readonly (string | number)[] {
  const real = realpathSync(path);
  const { size, mtimeMs } = statSync(real);
  return [real, size, mtimeMs];
}

let known: string | undefined;

function processor(): string {
  known ??= /^model name\s*:\s*(.*)$/m.exec(readFileSync('/proc/cpuinfo', 'latin1'))?.[1] ?? '';
  return known;
}

function digest(value: unknown): string {
  return createHash('sha256').update(JSON.stringify(value)).digest('hex').slice(0, 24);
}
