/**
 * What a virtual machine is, whoever runs it: QEMU (runtime/vm/qemu) or Firecracker. A driver knows machines, not sandboxes: what is on the
 * disks, who is on the network and what the agent says is the business of whoever calls.
 *
 * - The process of a machine outlives us. What it takes to find it again is in `VmSpec.folder`, written before the process is there; so whoever
 *   comes after a crash calls `find`, or `sweep` to be sure that nothing runs, with the folder alone.
 * - All sockets are in that folder, the machine listens on them: we may go and come back.
 * - Paths are absolute, and of this machine. Unix socket addresses end at 107 bytes: keep the folder's path below 80.
 */
import type { ServiceClass } from '../sandbox-api/sandbox.ts';
import type { OpenChannel } from './guest/open-channel.ts';

export interface VmDriver {
  readonly name: 'qemu' | 'firecracker';
  /** What this one can on this machine. Asked for nevertheless, it fails with VM_UNSUPPORTED. */
  readonly features: VmFeatures;
  /** Words of a guest's kernel's command line: what it has to know about its clock. */
  readonly clockArguments: string;
  /** The way to the agent in the machine of this folder, whether it runs yet or not. @param socket That of the spec's first port */
  agentChannel(folder: string, socket: string): OpenChannel;
  /**
   * Resolves when the machine's processors run; the guest has yet to boot. Nothing is left when it fails.
   * @throws VM_START, VM_UNSUPPORTED
   */
  start(spec: VmSpec): Promise<RunningVm>;
  /**
   * A machine as it was when `snapshot` was taken, standing still: `cont` has it go on. The spec is that of the machine of the snapshot but for `id`, `folder`,
   * paths of sources, sockets, tap, cgroups. `memoryFile`: made of the snapshot's memory; with `memory: 'private'` nothing is copied and pages become
   * its own when written (a fork; the snapshot must stay while it runs).
   */
  restore(spec: VmSpec, snapshot: string, options?: RestoreOptions): Promise<RunningVm>;
  /** The machine of this folder, where it runs. Undefined: no process of it is there. */
  find(folder: string): Promise<RunningVm | undefined>;
  /** Ends whatever process of this folder is there; its memory and record go too. Twice is no error. The folder stays. */
  sweep(folder: string): Promise<void>;
  /** Gives back what restores with `private` keep of a snapshot. Machines that run of it go on. */
  forgetSnapshot(snapshot: string): void;
}

export interface VmFeatures {
  readonly accelerator: 'kvm' | 'tcg';
  /** Read-only drives on virtio-pmem. */
  readonly pmem: boolean;
  /** Drives from an NBD socket. Without it they are files or block devices of this host. */
  readonly nbd: boolean;
  /** A blk drive's id is its serial number in the guest; else guests know them by their order alone. */
  readonly serials: boolean;
  /** Devices may come after the guest has booted (`VmSpec.lateDevices`). */
  readonly lateDevices: boolean;
  readonly snapshots: boolean;
  readonly privateMemory: boolean;
  readonly freePageReporting: boolean;
  readonly display: boolean;
  readonly firmware: boolean;
}

export interface RestoreOptions {
  readonly memory?: 'copied' | 'private';
}

export interface VmSpec {
  readonly id: string;
  /** The driver's own: sockets, record, console.log. Made by whoever calls, 0700. */
  readonly folder: string;
  readonly boot:
    | { readonly kernel: string; readonly initrd?: string; readonly commandLine: string }
    | { readonly firmware: 'bios' | 'uefi' };
  readonly cpus: number;
  /** A multiple of 2 MiB. */
  readonly memoryBytes: number;
  /** The guest's memory: a file of tmpfs (/dev/shm) that the driver makes and, when the machine has ended, removes. */
  readonly memoryFile: string;
  readonly drives: readonly VmDrive[];
  /**
   * Drives and network may come after its guest has booted: a snapshot of one that had none is restored by a spec with any, and the guest finds
   * them when it looks (1 into /sys/bus/pci/rescan). QEMU alone.
   */
  readonly lateDevices?: true;
  readonly network?: {
    readonly tap: string;
    readonly mac: string;
    /** To the guest, and from it. Firecracker alone. */
    readonly receive?: RateLimit;
    readonly send?: RateLimit;
  };
  /** Ports of virtio-serial, by name in the guest (/dev/virtio-ports/NAME); under Firecracker vsock. The first is the agent's. */
  readonly ports?: readonly VmPort[];
  readonly balloon?: { readonly freePageReporting: boolean };
  /** A device by which the guest's system knows when it is another machine than before, and draws its random numbers anew: another number at each start and restore. QEMU alone. */
  readonly generationId?: true;
  /** A screen of virtio-gpu, with keyboard, tablet and VNC on a socket of the folder. */
  readonly display?: { readonly width: number; readonly height: number };
  /** Files that the process writes its id into before it becomes the machine: cgroup.procs (v2) or tasks (v1). */
  readonly cgroups?: readonly string[];
  readonly serviceClass?: ServiceClass;
}

export interface VmDrive {
  /** Letters, digits, `-`; the serial number of a blk drive, where the driver has those: /dev/disk/by-id/virtio-ID, /sys/block/vdX/serial. At most 20. */
  readonly id: string;
  readonly source: /** Or a block device. `isServed`: by this process, which then must not wait for it. */
    | { readonly file: string; readonly format?: 'raw' | 'qcow2'; readonly isServed?: true }
    /** Unix socket of an NBD server. */
    | { readonly nbd: string; readonly export?: string };
  readonly readOnly: boolean;
  /**
   * `pmem`: /dev/pmemN, in the order of the spec; a read-only raw file, in whole 2 MiB (sparse end). Where the machine has any of those it is a q35.
   * `blk`: /dev/vdX, in the order of the spec.
   */
  readonly transport: 'pmem' | 'blk';
  /** The firmware starts from it. */
  readonly bootable?: boolean;
  /** Of a blk drive. Firecracker alone. */
  readonly limit?: RateLimit;
}

export interface RateLimit {
  readonly bytesPerSecond?: number;
  readonly operationsPerSecond?: number;
}

export interface VmPort {
  readonly name: string;
  /** Unix socket that the machine listens on. Who connects while somebody else is connected waits. */
  readonly socket: string;
}

export type VmState = 'running' | 'stopped';

export interface RunningVm {
  readonly folder: string;
  readonly pid: number;
  /** Of the first port. */
  readonly agentSocket: string | undefined;
  /** With it the agent listens on that port of vsock, and a connection to the socket is made by `connectVsock` (firecracker/vsock.ts). */
  readonly agentVsockPort?: number;
  /** Its serial console. */
  readonly console: VmConsole;
  readonly ended: Promise<VmEnd>;
  state(): Promise<VmState>;
  /** Processors stand still. What was written to the drives is flushed. */
  stop(): Promise<void>;
  cont(): Promise<void>;
  /**
   * Device state and memory into `folder`, which must not be there; the machine stands still afterwards (`cont` or `kill`). When it
   * fails nothing of the folder stays, and the machine is as before: running, or stopped. `base`: an older snapshot's folder; only pages that changed since are stored, and this
   * one needs that one from then on.
   */
  snapshot(folder: string, options?: { readonly base?: string; readonly signal?: AbortSignal }): Promise<SnapshotFacts>;
  /** As the power button: the guest may do with it what it wants. */
  powerDown(): Promise<void>;
  /** At once. Resolves when the process is gone and its record too; the folder stays. Twice is no error. */
  kill(): Promise<void>;
  /** We go and it stays, to be found by another process; `ended` never resolves here. */
  detach?(): void;
  /** The guest has at most that much. */
  setBalloon(memoryBytes: number): Promise<void>;
  /** What only QEMU has: screen, keys, and so on. */
  readonly qmp?: VmMonitor;
}

/** What it wrote last is in console.log of the folder too, at most 64 KiB. What it writes while we are not there is lost. */
export interface VmConsole {
  recent(): Buffer;
  /** What comes from now on. Returns what ends it. */
  follow(listener: (bytes: Buffer) => void): () => void;
  /** Resolves when more can be written. */
  write(bytes: Buffer, signal?: AbortSignal): Promise<void>;
}

/** A command of QEMU's monitor protocol. @throws VM_MONITOR */
export interface VmMonitor {
  execute(command: string, args?: object): Promise<unknown>;
}

export interface SnapshotFacts {
  readonly stateBytes: number;
  /** Of the layer that this snapshot added. */
  readonly memoryLayerBytes: number;
  readonly changedPages: number;
  readonly zeroPages: number;
}

export interface VmEnd {
  /** `guest`: it switched itself off or asked for a reset; `killed`: by `kill`; `crashed`: anything else. */
  readonly reason: 'guest' | 'killed' | 'crashed';
  /** For people: what the process said last. */
  readonly detail: string;
}
