/** What the converter asks of its workers, and what they answer: plain, cloneable values. */
import type { MessagePort } from 'node:worker_threads';
import type { ByteString } from '#base';
import type { BlobDigests } from '#linux';
import type { CodecName } from './cluster-codec.ts';
import type { SpoolIndex } from './spool-format.ts';

/** Reads, verifies, inflates and parses one layer into a spool. */
export interface SpoolJob {
  readonly op: 'spool';
  readonly label: string;
  readonly layer: number;
  /** Where in the image its tree is placed; see entry-prefix.ts. */
  readonly prefix: ByteString | undefined;
  readonly source:
    | { readonly kind: 'file'; readonly path: string; readonly offset: number; readonly sizeBytes: number }
    | { readonly kind: 'stream'; readonly port: MessagePort }
    | { readonly kind: 'folder'; readonly path: string };
  readonly compression: 'gzip' | 'zstd' | 'plain' | 'detect';
  readonly digest: string | undefined;
  readonly sizeBytes: number | undefined;
  readonly diffId: string | undefined;
  readonly dataPath: string;
  readonly tailPath: string;
  readonly tailLimitBytes: number;
  readonly codec: CodecName | undefined;
  /** See FileSpoolOptions. */
  readonly becomesBlob: boolean;
}

export interface SpoolResult {
  readonly index: SpoolIndex;
  /** Digest of the uncompressed tar; of a folder, undefined. */
  readonly diffId: string | undefined;
  readonly blobBytes: number;
  readonly tarBytes: number;
  /** Where its data begins in its file: not 0 in a stack. */
  readonly dataOffset: number;
  readonly dataBytes: number;
  /** Bytes of regular files, holes included. */
  readonly fileBytes: number;
  /** Things left out or changed, for the user. */
  readonly notes: readonly string[];
  /** Of the data spool, if it becomes a blob. */
  readonly digests: BlobDigests | undefined;
}

/**
 * Spools layers one after the other: their data into one file, whose digests come at the end, or each into its own. Each result
 * comes as a part.
 */
export interface StackJob {
  readonly op: 'stack';
  readonly layers: readonly SpoolJob[];
  /** Of the one file, which is also their `dataPath`; undefined when there are several. */
  readonly dataPath: string | undefined;
  /** Shared memory: not 0 once it is known that the file will not be a blob as it is. Then there are no digests. */
  readonly doomed: Int32Array;
}

/** A part of a local file, in bytes. */
export interface Run {
  readonly path: string;
  readonly offset: number;
  readonly length: number;
}

/** The digests of a blob that is these runs, one after the other; with `out`, it is also written there. */
export interface BlobJob {
  readonly op: 'blob';
  readonly runs: readonly Run[];
  readonly out: string | undefined;
}

export type Job = SpoolJob | StackJob | BlobJob;

export interface JobResults {
  readonly spool: SpoolResult;
  readonly stack: BlobDigests | undefined;
  readonly blob: BlobDigests;
}

export type WorkerRequest = { readonly id: number; readonly job: Job };

export type WorkerReply =
  /** Its libraries are loaded: from here on it may be ended. */
  | { readonly kind: 'ready' }
  /** `part`: which layer of a stack. */
  | { readonly id: number; readonly kind: 'progress'; readonly part: number; readonly doneBytes: number }
  | { readonly id: number; readonly kind: 'part'; readonly part: number; readonly result: SpoolResult }
  | { readonly id: number; readonly kind: 'done'; readonly result: unknown }
  | { readonly id: number; readonly kind: 'failed'; readonly error: FailedJob };

/** An error on its way between threads, class and fields kept. */
export interface FailedJob {
  readonly code: string | undefined;
  readonly message: string;
  readonly hint: string | undefined;
  readonly row: { exit: number; http: number; retryable: boolean } | undefined;
  readonly stack: string | undefined;
}

/** Messages on a stream's port: the worker grants bytes, the converter sends them. */
export type StreamGrant = { readonly grantBytes: number };
export type StreamChunk = { readonly chunk: Uint8Array } | { readonly end: true } | { readonly error: FailedJob };
