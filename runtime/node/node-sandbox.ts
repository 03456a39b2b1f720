/**
 * A sandbox that stays, as its node has it: what every client sees (`Sandbox`), and what the node, the routes, packing and forks need besides. In a
 * container it is a ResidentSandbox, in a virtual machine a VmSandbox (vm/vm-sandbox.ts); whoever uses one does not ask which.
 */
import type { KeptCommand } from '../aether/kept-command.ts';
import type { SandboxRecord, SandboxTag } from '../sandbox/sandbox-record.ts';
import type { ExecSpec } from '../sandbox-api/exec.ts';
import type { Sandbox, SandboxEnd } from '../sandbox-api/sandbox.ts';
import type { ShellSession } from '../sandbox-api/shell.ts';
import type { Moment } from '../vm/fork/moment.ts';
import type { OpenFile } from './open-files.ts';
import type { ResidentNetwork } from './resident-network.ts';

/** Of a sandbox whose commands stand still. */
export interface StandsStill {
  readonly record: SandboxRecord;
  /** Its changes, as they are now. */
  readonly upper: string;
  /** Those of its files that are open for writing. */
  readonly openFiles: readonly OpenFile[];
  /** It may go on. */
  done(): void;
  /** It is being ended, and what is read from now on may be half done. */
  readonly signal: AbortSignal;
}

export interface NodeSandbox extends Sandbox {
  /** Its agent has answered. Rejects with why it never did. */
  readonly ready: Promise<void>;
  /** What is on record. */
  readonly facts: SandboxRecord;
  readonly network: Pick<ResidentNetwork, 'view' | 'setPolicy' | 'counters' | 'denied'>;
  readonly runningCommands: number;
  /** It has ended, and not all of it could be undone. */
  readonly leftSomething: boolean;
  exec(spec: ExecSpec): Promise<KeptCommand>;
  commands(): KeptCommand[];
  /** One that was opened here. @throws RUNTIME_EXEC_NOT_FOUND */
  shell(id: number): ShellSession;
  /** Its record has this one from now on. @throws RUNTIME_STATE of a full disk; then it is as it was */
  retag(tag: SandboxTag): void;
  /** `work` while no command of it moves. @throws RUNTIME_PAUSE_STUCK, RUNTIME_UNSUPPORTED, RUNTIME_SANDBOX_GONE */
  whileStill<T>(work: (still: StandsStill) => Promise<T>): Promise<T>;
  /**
   * It as it is now, with its memory, to make others of (`CreateOptions.moment`); to be discarded when they are made. It goes on at once, or stays paused.
   * @throws RUNTIME_UNSUPPORTED, RUNTIME_NO_SPACE, VM_SNAPSHOT, VM_GUEST_SILENT, VM_GUEST_STUCK, RUNTIME_SANDBOX_GONE
   */
  takeMoment(): Promise<Moment>;
  /**
   * Of one that was made of a moment: on record, so that it goes on whoever serves it next; it stands still as before. Twice, or of any other, it is nothing.
   * @throws RUNTIME_RECORD_WRITE, RUNTIME_SANDBOX_GONE
   */
  markReady(): Promise<void>;
  /** Of one that was made of a moment: what it holds runs from now on. Twice, or of any other, it is nothing. @throws as `markReady`, VM_GUEST_SILENT */
  goOn(): Promise<void>;
  /** While `work` goes on it is in use, and not paused when that begins. */
  use<T>(work: () => Promise<T>): Promise<T>;
  /** While `work` goes on it is in use; one that is paused stays so. */
  useAsItIs<T>(work: () => Promise<T>): Promise<T>;
  /** Ends it at once; nothing of it stays. */
  destroy(): Promise<void>;
  /** It goes on, and is another process's. */
  leave(): void | Promise<void>;
  readonly end: SandboxEnd | undefined;
}
