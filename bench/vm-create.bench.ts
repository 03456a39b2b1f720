/**
 * Sandboxes in virtual machines that begin from a template (the warm pool) against those that boot: until a new one is there (its agent answers) and until
 * its first command has ended, and what processor time that takes of service and machine. In turns, one machine at a time, on one host, from one store. Promised: a fifth. Emulated (no KVM) only
 * the ratio means something.
 */
import { join } from 'node:path';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { writeLayout } from './image-layout.ts';
import { LabUnavailable, labKernel } from './lab/kernel.mjs';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { summary } from './sample.ts';
import { SandboxHost, sandboxesMissing } from './sandbox-host.ts';
import { busyboxLayer } from './small-image.ts';
import { missingTool } from './tool.ts';
import { withScratch } from './work-folder.ts';

const PROMISED = 0.2;
const MEMORY_BYTES = 512 * 2 ** 20;
const SIZE = { backend: 'microvm', cpus: 1, memoryBytes: MEMORY_BYTES };
/** `shared`: memory of the template until it is written; nothing is reported then. */
const KINDS = {
  default: {},
  shared: { memory: { reporting: false } },
} as const;
type Kind = keyof typeof KINDS;

export const benchmark: Benchmark = {
  name: 'vm-create',
  about: 'a sandbox in a virtual machine from the warm pool against one that boots: until its agent answers',
  needs: () => sandboxesMissing() ?? missingTool({ 'qemu-system-x86_64': 'qemu-system-x86' }) ?? kernelMissing(),
  run: () => withScratch('vm-create', measure),
};

function kernelMissing(): string | undefined {
  try {
    labKernel();
    return undefined;
  } catch (error) {
    if (error instanceof LabUnavailable) return error.message;
    throw error;
  }
}

async function measure(folder: string): Promise<Result> {
  const n = numberOption('n', 5);
  // Emulated or not is found out by the service.
  process.env.DSEC_VM_KERNEL ??= labKernel().base;
  const layout = writeLayout(join(folder, 'layout'), 'small', [await busyboxLayer(folder)], ['sh']);
  const hosts: SandboxHost[] = [];
  const sides: Record<'cold' | 'warm' | 'shared', Created[]> = { cold: [], warm: [], shared: [] };
  try {
    const of = async (name: string, pool: 'on' | 'off') => {
      const dsec = new DsecCommand(join(folder, name));
      dsec.env.DSEC_VM_POOL = pool;
      await dsec.convert(`oci:${layout}`, 'small:1');
      if (pool === 'on') {
        const size = ['vm', 'template', 'make', '--cpus', '1', '--memory', String(MEMORY_BYTES)];
        await dsec.run(size);
        await dsec.run([...size, '--no-reporting']);
      }
      const started = await SandboxHost.start(dsec);
      hosts.push(started);
      return started;
    };
    const host = { warm: await of('warm', 'on'), cold: await of('cold', 'off') };
    const ways = [
      ['cold', host.cold, 'default'],
      ['warm', host.warm, 'default'],
      ['shared', host.warm, 'shared'],
    ] as const;
    // What all of one kind share is in memory then.
    for (const [, on, kind] of ways) await on.remove(await on.create('small:1', { ...SIZE, ...KINDS[kind] }));
    for (let run = 0; run < n; run++) {
      for (const [name, on, kind] of ways) {
        sides[name].push(await created(on, kind));
      }
    }
  } finally {
    for (const host of hosts) await host.stop();
  }
  const of = (name: keyof typeof sides) => {
    const median = (what: keyof Created) => summary(sides[name].map((one) => one[what])).p50;
    return {
      wallMs: median('wallMs'),
      cpuMs: median('cpuMs'),
      commandMs: median('commandMs'),
      commandCpuMs: median('commandCpuMs'),
    };
  };
  const [cold, warm, shared] = [of('cold'), of('warm'), of('shared')];
  const row = (title: string, one: Created) => [
    title,
    ...[one.wallMs, one.cpuMs, one.commandMs, one.commandCpuMs].map((ms) => `${Math.round(ms)} ms`),
  ];
  printTable([
    ['', 'created', 'CPU', 'first command', 'CPU'],
    row('cold boot', cold),
    row('from the pool', warm),
    row('from the pool, memory shared', shared),
  ]);
  const ratio = round(warm.wallMs / cold.wallMs);
  return {
    ratio,
    ...atMost(PROMISED, ratio),
    against: 'cold boot of the same sandbox, $DSEC_VM_POOL=off',
    n,
    p50: round(warm.wallMs),
    p99: round(Math.max(...sides.warm.map(({ wallMs }) => wallMs))),
    unit: 'ms',
    cpuRatio: round(warm.cpuMs / cold.cpuMs),
    commandRatio: round(warm.commandMs / cold.commandMs),
    commandCpuRatio: round(warm.commandCpuMs / cold.commandCpuMs),
    sharedRatio: round(shared.wallMs / cold.wallMs),
    sharedCpuRatio: round(shared.cpuMs / cold.cpuMs),
    cold,
    warm,
    shared,
  };
}

interface Created {
  readonly wallMs: number;
  readonly cpuMs: number;
  /** From the beginning. */
  readonly commandMs: number;
  readonly commandCpuMs: number;
}

async function created(host: SandboxHost, kind: Kind): Promise<Created> {
  await host.rest();
  const before = host.cpuMs();
  const began = performance.now();
  const name = await host.create('small:1', { ...SIZE, ...KINDS[kind] });
  const cpu = async () => host.cpuMs() - before + (await host.client.usage(name, false)).cpuUsec / 1000;
  const wallMs = performance.now() - began;
  const cpuMs = await cpu();
  await host.exec(name, ['true']);
  const commandMs = performance.now() - began;
  const commandCpuMs = await cpu();
  await host.remove(name);
  return { wallMs, cpuMs, commandMs, commandCpuMs };
}
