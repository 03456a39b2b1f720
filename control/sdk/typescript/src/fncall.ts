/** Short tasks that leave nothing behind: code goes in, what it wrote, used and made comes out. */
import { Buffer } from 'node:buffer';
import { mebibytes, milliseconds } from './run-args.ts';
import type { CallOptions, Transport } from './transport.ts';

export interface FnCallLimits {
  /** Of the run, in milliseconds; the compiler has its own. */
  readonly wallMs?: number;
  readonly compileMs?: number;
  /** Processor time of all its processes together. */
  readonly cpuMs?: number;
  readonly memoryBytes?: number;
  readonly pids?: number;
  /** Of each stream: what is kept. */
  readonly outputBytes?: number;
  readonly diskBytes?: number;
}

export interface FnCallTask {
  /** `python`, `c`, `cpp`, `go`, `rust`, `java`, `javascript`, `bash`, ... */
  readonly language: string;
  readonly code?: string;
  /** The pool called `default` unless one or an image is named. */
  readonly pool?: string;
  readonly image?: string;
  readonly workspace?: string;
  readonly toolkits?: readonly string[];
  readonly project?: string;
  /** By path. */
  readonly files?: Readonly<Record<string, string | Uint8Array>>;
  readonly stdin?: string | Uint8Array;
  readonly args?: readonly string[];
  readonly env?: Readonly<Record<string, string>>;
  readonly limits?: FnCallLimits;
  /** Patterns of files to bring back. */
  readonly fetch?: readonly string[];
  readonly compileOnly?: boolean;
  /** `false`: by an interpreter that starts for it. */
  readonly warm?: boolean;
  /** A task that runs before it, maybe in another pool: the files that it gives back (`fetch`) are put in. */
  readonly from?: Omit<FnCallTask, 'from' | 'project'>;
}

/** A task, in the words of the other run arguments. */
export interface DSecFnCallRunArgs extends Omit<FnCallTask, 'image'> {
  /** In place of a pool. */
  readonly containerImage?: string;
  /** MiB. */
  readonly memoryLimitMb?: number;
  /** MiB. */
  readonly diskLimitMb?: number;
  readonly pidsLimit?: number;
  /** Of the run, in seconds; the compiler has its own. */
  readonly timeLimitSeconds?: number;
  /** Processor time of all its processes together. */
  readonly cpuLimitSeconds?: number;
}

/** What `FnCall.run` takes; `limits` are further ones, above the others. */
export function taskOf(args: DSecFnCallRunArgs): FnCallTask {
  const { containerImage, memoryLimitMb, diskLimitMb, pidsLimit, timeLimitSeconds, cpuLimitSeconds, ...task } = args;
  const named: FnCallLimits = {
    wallMs: milliseconds(timeLimitSeconds),
    cpuMs: milliseconds(cpuLimitSeconds),
    memoryBytes: mebibytes(memoryLimitMb),
    diskBytes: mebibytes(diskLimitMb),
    pids: pidsLimit,
  };
  return { ...task, image: containerImage, limits: { ...named, ...task.limits } };
}

export type FnCallStatus =
  | 'finished'
  | 'compile_error'
  | 'runtime_error'
  | 'time_limit'
  | 'memory_limit'
  | 'output_limit'
  | 'sandbox_error';

export interface FnCallStep {
  readonly status: Exclude<FnCallStatus, 'compile_error'>;
  /** Undefined when a signal ended it. */
  readonly exitCode: number | undefined;
  readonly signal: string | undefined;
  readonly stdout: Buffer;
  readonly stderr: Buffer;
  /** What it wrote: more than there is above where that is cut. */
  readonly stdoutBytes: number;
  readonly stderrBytes: number;
  readonly wallMs: number;
  readonly cpuMs: number;
  readonly peakMemoryBytes: number | undefined;
}

export interface FnCallResult {
  readonly status: FnCallStatus;
  readonly problem: string | undefined;
  readonly compile: FnCallStep | undefined;
  readonly run: FnCallStep | undefined;
  readonly files: Readonly<Record<string, Buffer>>;
  readonly pool: string;
  readonly queueMs: number;
}

type Wire = Readonly<Record<string, unknown>>;

export class FnCall {
  private readonly transport: Transport;

  constructor(transport: Transport) {
    this.transport = transport;
  }

  /** While all are busy it is asked again, until the time is up. @throws RateLimited, NotFound, InvalidRequest, Unavailable */
  async run(task: FnCallTask, options: CallOptions = {}): Promise<FnCallResult> {
    const { from, ...rest } = task;
    const body = { ...wireTask(rest), from: from && wireTask(from) };
    return resultOf(await this.transport.json<Wire>('POST', '/v1/fncall/run', { ...options, body }));
  }

  /** How each language is compiled and run. */
  async languages(options: CallOptions = {}): Promise<Readonly<Record<string, unknown>>> {
    return this.transport.json('GET', '/v1/fncall/languages', options);
  }
}

function wireTask({ files, stdin, ...rest }: FnCallTask): Wire {
  return {
    ...rest,
    files: files && Object.entries(files).map(([path, content]) => ({ path, contentBase64: base64(content) })),
    stdinBase64: stdin === undefined ? undefined : base64(stdin),
  };
}

function base64(content: string | Uint8Array): string {
  return Buffer.from(content as Uint8Array).toString('base64');
}

function bytesOf(wire: Wire, name: string): Buffer {
  const encoded = wire[`${name}Base64`];
  return typeof encoded === 'string' ? Buffer.from(encoded, 'base64') : Buffer.from(String(wire[name] ?? ''));
}

function stepOf(wire: Wire | undefined): FnCallStep | undefined {
  if (wire === undefined) return undefined;
  const { stdoutBase64: _o, stderrBase64: _e, ...rest } = wire;
  return { ...rest, stdout: bytesOf(wire, 'stdout'), stderr: bytesOf(wire, 'stderr') } as unknown as FnCallStep;
}

function resultOf(wire: Wire): FnCallResult {
  const files = (wire.files ?? []) as readonly Wire[];
  return {
    ...wire,
    compile: stepOf(wire.compile as Wire | undefined),
    run: stepOf(wire.run as Wire | undefined),
    files: Object.fromEntries(files.map((one) => [String(one.path), bytesOf(one, 'content')])),
  } as unknown as FnCallResult;
}
