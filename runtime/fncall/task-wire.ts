/** Frames between a pool and the task program in a container (runtime/agent/src/task.rs): docs/agent-protocol.md. */
import { getSystemErrorMap } from 'node:util';
import { PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { stageText } from '../backend/launch-order.ts';

export const TASK_FRAME = {
  configure: 90,
  file: 91,
  task: 92,
  hello: 150,
  ready: 190,
  stepDone: 191,
  stepNotRun: 192,
  fetched: 193,
  end: 194,
  cleaned: 195,
  failed: 196,
  begun: 197,
} as const;

/** One value in one file of the task's control group, in the hierarchy of that number. */
export type GroupFileWrite = readonly [dir: number, file: string, value: string];

export interface GroupPlan {
  readonly dirs: readonly number[];
  readonly peak?: readonly [dir: number, file: string];
  readonly killed?: readonly [dir: number, file: string];
  readonly cpu?: readonly [dir: number, file: string];
}

export interface TaskPlan {
  readonly uid: number;
  readonly gid: number;
  readonly diskBytes: number;
  readonly inodes: number;
  readonly namespaces: bigint;
  readonly privateFolders: readonly (readonly [path: string, mode: number])[];
  readonly masked: readonly string[];
  readonly readOnly: readonly string[];
  readonly groups: GroupPlan;
  /** Limits that a task's group has before a task comes: one that is to have these is told nothing more. */
  readonly usual: readonly GroupFileWrite[];
  readonly seccomp: Buffer;
  readonly zygote?: { readonly args: readonly string[]; readonly env: readonly string[]; readonly setup: string };
}

export function configureBytes(plan: TaskPlan): Buffer {
  const out = new PayloadWriter();
  out.u32(plan.uid).u32(plan.gid).u64(BigInt(plan.diskBytes)).u64(BigInt(plan.inodes)).u64(plan.namespaces);
  out.list(plan.privateFolders, ([path, mode]) => out.bytes(path).u32(mode));
  out.list(plan.masked, (path) => out.bytes(path));
  out.list(plan.readOnly, (path) => out.bytes(path));
  out.list(plan.groups.dirs, (dir) => out.u32(dir));
  for (const place of [plan.groups.peak, plan.groups.killed, plan.groups.cpu]) {
    out.u32(place?.[0] ?? 0).bytes(place?.[1] ?? '');
  }
  putWrites(out, plan.usual);
  out.bytes(plan.seccomp);
  out.u8(plan.zygote === undefined ? 0 : 1);
  if (plan.zygote !== undefined) {
    out.list(plan.zygote.args, (arg) => out.bytes(arg));
    out.list(plan.zygote.env, (entry) => out.bytes(entry));
    out.bytes(plan.zygote.setup);
  }
  return out.done();
}

function putWrites(out: PayloadWriter, writes: readonly GroupFileWrite[]): void {
  out.list(writes, ([dir, file, value]) => out.u32(dir).bytes(file).bytes(value));
}

export interface StepOrder {
  /** By a fork of the interpreter that stays; `args` are the script and its arguments. */
  readonly forked: boolean;
  readonly args: readonly string[];
  readonly env: readonly string[];
  readonly cwd: string;
  readonly stdin: Buffer;
  readonly wallMs: number;
  readonly cpuMs: number;
  readonly outputBytes: number;
  readonly writtenBytes: number;
  readonly limits: readonly (readonly [resource: number, soft: bigint, hard: bigint])[];
  readonly writes: readonly GroupFileWrite[];
}

export interface TaskOrder {
  readonly diskBytes: number;
  readonly steps: readonly StepOrder[];
  readonly cwd: string;
  readonly fetch: readonly string[];
  readonly maxFiles: number;
  readonly maxBytes: number;
}

export function taskBytes(task: TaskOrder): Buffer {
  const out = new PayloadWriter();
  out.u64(BigInt(task.diskBytes));
  out.list(task.steps, (step) => {
    out.u8(step.forked ? 1 : 0);
    out.list(step.args, (arg) => out.bytes(arg));
    out.list(step.env, (entry) => out.bytes(entry));
    out.bytes(step.cwd).bytes(step.stdin);
    out.u64(BigInt(step.wallMs) * 1000n).u64(BigInt(step.cpuMs) * 1000n);
    out.u64(BigInt(step.outputBytes)).u64(BigInt(step.writtenBytes));
    out.list(step.limits, ([resource, soft, hard]) => out.u32(resource).u64(soft).u64(hard));
    putWrites(out, step.writes);
  });
  out.bytes(task.cwd);
  out.list(task.fetch, (pattern) => out.bytes(pattern));
  out.u32(task.maxFiles).u64(BigInt(task.maxBytes));
  return out.done();
}

/** Below the limit of a frame. */
const PART_BYTES = 4 << 20;

/** A file in as many frames as it needs. */
export function* filePayloads(path: string, mode: number, content: Buffer): Generator<Buffer> {
  for (let at = 0; at === 0 || at < content.length; at += PART_BYTES) {
    const part = content.subarray(at, at + PART_BYTES);
    yield new PayloadWriter()
      .bytes(path)
      .u32(mode)
      .u8(at === 0 ? 0 : 1)
      .bytes(part)
      .done();
  }
}

export const REASONS = ['none', 'wall', 'cpu', 'memory', 'output'] as const;

export interface StepReport {
  readonly step: number;
  /** As waitpid has it. */
  readonly status: number;
  readonly reason: (typeof REASONS)[number];
  readonly wallMs: number;
  readonly cpuMs: number;
  readonly peakBytes: number;
  readonly stdoutBytes: number;
  readonly stderrBytes: number;
  readonly stdout: Buffer;
  readonly stderr: Buffer;
}

export function readStep(payload: Buffer): StepReport {
  const r = new PayloadReader(payload);
  const number = () => Number(r.u64());
  const [step, status, reason] = [r.u8(), r.i32(), REASONS[r.u8()] ?? 'none'];
  const [wallUs, cpuUs, peakBytes, stdoutBytes, stderrBytes] = [number(), number(), number(), number(), number()];
  const [stdout, stderr] = [Buffer.from(r.bytes()), Buffer.from(r.bytes())];
  const [wallMs, cpuMs] = [wallUs / 1000, cpuUs / 1000];
  return { step, status, reason, wallMs, cpuMs, peakBytes, stdoutBytes, stderrBytes, stdout, stderr };
}

/** A program that could not be executed; step 255: a file that could not be written. */
export function readNotRun(payload: Buffer): { step: number; what: string; code: string } {
  const r = new PayloadReader(payload);
  const [step, errno] = [r.u8(), r.i32()];
  const code = getSystemErrorMap().get(-errno)?.[0] ?? `errno ${errno}`;
  return { step, what: r.bytes().toString(), code };
}

const PARTS = ['first', 'more', 'taken back'] as const;

/** `taken back`: it could not be given whole, and what came of it is none. */
export function readFetched(payload: Buffer): { part: (typeof PARTS)[number]; path: Buffer; bytes: Buffer } {
  const r = new PayloadReader(payload);
  return { part: PARTS[r.u8()] ?? 'more', path: Buffer.from(r.bytes()), bytes: Buffer.from(r.bytes()) };
}

export function readText(payload: Buffer): string {
  return new PayloadReader(payload).bytes().toString();
}

/** What the program in the container could not do. */
export function readFailure(payload: Buffer): string {
  const r = new PayloadReader(payload);
  const [stage, errno] = [r.u8(), r.i32()];
  const code = getSystemErrorMap().get(-errno)?.[0] ?? `errno ${errno}`;
  return `${stageText(stage)} ${r.bytes().toString()}: ${code}`;
}
