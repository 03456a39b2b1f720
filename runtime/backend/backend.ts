/**
 * What runs the first process of a container: our own launcher, or an OCI runtime, behind the same few operations. A backend knows
 * processes and isolation; it knows nothing of images, stores, layers or records.
 *
 * - `launch` creates and starts in one step, which is what every backend does cheapest. It resolves when the sandbox's
 *   first process runs. When it rejects, `remove` has still to be called: something may be half there.
 * - `wait` may be called any number of times and never loses an exit.
 * - `kill` of something that has ended is no error.
 * - `remove` ends what runs and takes away all that the backend made for an id, from any state, by whichever process
 *   launched it, also twice. It is what a later process calls after the one that launched was killed.
 */

import type { Readable, Writable } from 'node:stream';
import type { SandboxLimits } from '../sandbox-api/limits.ts';
import type { ServiceClass } from '../sandbox-api/sandbox.ts';
import type { DeviceNode } from './device-rules.ts';

export interface BackendCapabilities {
  /** Whether an exit by signal can be told from an exit with 128 + n. */
  readonly exactSignals: boolean;
  readonly terminal: boolean;
  readonly hostNetwork: boolean;
}

export interface ProcessSpec {
  readonly args: readonly string[];
  /** `NAME=VALUE`, each name once. */
  readonly env: readonly string[];
  /** Absolute, inside the root, exists. */
  readonly cwd: string;
  readonly uid: number;
  readonly gid: number;
  readonly additionalGids: readonly number[];
  /** The standard streams are a terminal of the sandbox's own. */
  readonly terminal: boolean;
  /** Of the terminal at the start, where it is known. */
  readonly terminalSize?: { readonly rows: number; readonly columns: number };
}

export interface LaunchSpec {
  /** Unique on this machine, [a-z0-9._-]. */
  readonly id: string;
  /** A folder of this sandbox's own for the backend's files. */
  readonly folder: string;
  /** The mounted, writable root. */
  readonly root: string;
  readonly hostname: string;
  readonly network: 'none' | 'host';
  /** What its root is outside: its user namespace has that range of ids. Without: root is root, as far as the rest allows. */
  readonly idBase?: number;
  /** What it may use, and the device that limits on I/O are for. */
  readonly limits?: SandboxLimits;
  readonly device?: string;
  /** In its /dev, beside those of every sandbox. */
  readonly devices?: readonly DeviceNode[];
  /** Files of this machine to show inside, read-only; the targets exist. */
  readonly binds: readonly { readonly source: string; readonly target: string; readonly exec?: boolean }[];
  readonly process: ProcessSpec;
  /** `agent`: it stays, and what commands may do to its first process is little. */
  readonly firstProcess?: 'command' | 'agent';
  readonly serviceClass?: ServiceClass;
  /** `inherit`: those of this process. `pipe`: streams of the running sandbox. */
  readonly stdio: 'inherit' | 'pipe';
}

/** What of a LaunchSpec is known before its root is mounted. */
export type PreparationSpec = Pick<LaunchSpec, 'id' | 'network' | 'stdio' | 'idBase' | 'limits' | 'device'> & {
  readonly terminal: boolean;
};

/** How the first process ended, as far as the backend knows it. */
export interface Exit {
  /** 128 + n after signal n. */
  readonly code: number;
  /** The signal that was sent to it and ended it; of other signals only with `exactSignals`. */
  readonly signal?: NodeJS.Signals;
  /** Its limit on memory was reached, and the kernel ended a process for it: this one, or another one of the sandbox. */
  readonly outOfMemory?: boolean;
}

export interface RunningSandbox {
  /** With stdio `pipe`. */
  readonly stdin: Writable | null;
  readonly stdout: Readable | null;
  readonly stderr: Readable | null;
  /**
   * Resolves when the first process has ended and, with `pipe`, all its output was read.
   * @throws RUNTIME_START_FAILED and its kin when it never ran
   */
  wait(): Promise<Exit>;
  /** To the first process. One that it does not care for ends the sandbox, as it would end any program. */
  kill(signal: NodeJS.Signals): void;
}

export interface Backend {
  readonly name: string;
  readonly capabilities: BackendCapabilities;
  /**
   * For a backend that can begin before the root is there: so that it works while that is mounted. Only once what will undo it is
   * on record; nothing is reported, `launch` tells what failed.
   */
  prepare?(spec: PreparationSpec): void;
  /**
   * Descriptor of a user namespace with the ids of `idBase`, by which the owners of the root's layers are shifted. Asked for after
   * `prepare`, before `launch`; closed by the caller.
   */
  userNamespace(spec: PreparationSpec & { readonly idBase: number }): Promise<number>;
  launch(spec: LaunchSpec): Promise<RunningSandbox>;
  /**
   * As `kill` of the running sandbox, by whichever process; `folder` is that of its LaunchSpec.
   * False when it does not run (any more, or yet).
   */
  signal(id: string, folder: string, signal: NodeJS.Signals): boolean;
  remove(id: string): Promise<void>;
}
