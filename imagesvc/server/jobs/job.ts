/**
 * One piece of work that outlives a request and the process that runs it.
 *
 * Its id is made of what was asked for, so asking again is asking for the same job. It can be queued again, under the same
 * id: after a failure, after a restart of the service, or because its source may have changed meanwhile; each time is a
 * new `attempt`.
 */
import { digestOf, hexOf } from '#base';
import type { CodecName } from '#converter';
import type { ImageKind } from '../../catalog/image.ts';

export interface ConvertRequest {
  readonly source: string;
  readonly name: string;
  readonly kind?: Extract<ImageKind, 'base' | 'workspace' | 'toolkit'>;
  readonly collapse?: 'data' | 'metadata';
  readonly collapseLimitBytes?: number;
  readonly inlineLimitBytes?: number;
  readonly compress?: CodecName;
  /** `os/arch[/variant]` */
  readonly platform?: string;
  /** Folder of the image that the tree of a tar or a folder is placed at. */
  readonly prefix?: string;
  readonly insecure?: boolean;
}

export interface PackDiffRequest {
  readonly upper: string;
  /** Name or digest of the image that lay below. */
  readonly image: string;
  readonly name: string;
  readonly kind?: Extract<ImageKind, 'workspace' | 'toolkit' | 'snapshot'>;
  readonly exclude?: readonly string[];
  readonly policy?: boolean;
  readonly compress?: CodecName;
}

export type JobWork =
  | { readonly kind: 'convert'; readonly request: ConvertRequest }
  | { readonly kind: 'pack-diff'; readonly request: PackDiffRequest };

export const JOB_STATES = ['queued', 'running', 'done', 'failed', 'cancelled'] as const;
export type JobState = (typeof JOB_STATES)[number];

export interface JobError {
  readonly code: string;
  readonly message: string;
  readonly hint?: string;
  /** Exit status of the command line for this error. */
  readonly exit: number;
  readonly retryable: boolean;
}

/** What callers see. */
export type JobView = JobWork & {
  readonly id: string;
  readonly state: JobState;
  /** Who asked for it first. */
  readonly caller: string;
  readonly attempt: number;
  readonly createdAt: string;
  readonly startedAt?: string;
  readonly endedAt?: string;
  readonly cancelling?: boolean;
  readonly result?: JobResult;
  readonly error?: JobError;
};

export interface JobResult {
  readonly name: string;
  readonly digest: string;
  readonly kind: string;
  readonly layers: number;
  readonly metaBytes: number;
  readonly dataBytes: number;
  readonly sizeBytes: number;
  readonly reused: boolean;
  readonly stats?: Readonly<Record<string, number>>;
  readonly notes: readonly string[];
}

/** As it is on disk. */
export interface Job {
  readonly version: 1;
  readonly id: string;
  readonly work: JobWork;
  readonly caller: string;
  readonly createdAt: string;
  state: JobState;
  attempt: number;
  /** How often a process died while it ran, since it was last asked for. */
  crashes: number;
  queuedAt: string;
  startedAt?: string;
  endedAt?: string;
  cancelling?: boolean;
  result?: JobResult;
  error?: JobError;
  /** `user:password` for the registry; forgotten when the job ends. */
  credentials?: string;
  /** Of the request that asked last, when it had one: asking with the same key never starts it again. */
  idempotencyKey?: string;
}

export function isEnded(state: JobState): boolean {
  return state === 'done' || state === 'failed' || state === 'cancelled';
}

export function jobView(job: Job): JobView {
  const { id, state, caller, attempt, createdAt, startedAt, endedAt, cancelling, result, error } = job;
  return { id, ...job.work, state, caller, attempt, createdAt, startedAt, endedAt, cancelling, result, error };
}

/** The same work gives the same id, however its fields are ordered. Whoever uses other credentials has another job. */
export function jobId(work: JobWork, credentials: string | undefined): string {
  const facts = [work.kind, sorted(work.request), credentials ?? ''];
  return hexOf(digestOf(JSON.stringify(facts))).slice(0, 24);
}

function sorted(request: object): [string, unknown][] {
  return Object.entries(request)
    .filter(([, value]) => value !== undefined)
    .sort(([a], [b]) => (a < b ? -1 : 1));
}
