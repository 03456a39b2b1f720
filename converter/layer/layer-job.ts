/** What the converter asks of its workers, and what they answer: plain, cloneable values. */
import type { MessagePort } from 'node:worker_threads';
import type { ByteString } from '#base';
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
  /** Who hashes the data spool while it grows: nobody, this worker, or a follow job that is told how far it is settled. */
  readonly follower: MessagePort | 'self' | undefined;
}

export interface SpoolResult {
  readonly index: SpoolIndex;
  /** Digest of the uncompressed tar; of a folder, undefined. */
  readonly diffId: string | undefined;
  readonly blobBytes: number;
  readonly tarBytes: number;
  readonly dataBytes: number;
  /** Bytes of regular files, holes included. */
  readonly fileBytes: number;
  /** Things left out or changed, for the user. */
  readonly notes: readonly string[];
  /** Of the data spool, where the worker itself hashed it. */
  readonly digests?: FollowResult | undefined;
}

/** A part of a local file, in bytes. */
export interface Run {
  readonly path: string;
  readonly offset: number;
  readonly length: number;
}

/** sha256 over runs, one after the other. */
export interface DigestJob {
  readonly op: 'digest';
  readonly runs: readonly Run[];
}

/** sha256 of each 256 KiB over runs; with `out`, the runs are also written there. */
export interface ChunkJob {
  readonly op: 'chunks';
  readonly runs: readonly Run[];
  readonly out: string | undefined;
}

export interface ChunkResult {
  /** Concatenated 32-byte digests. */
  readonly digests: Uint8Array;
}

/** Both digests of a data spool that is still being written: hashed as far as messages on `port` say. */
export interface FollowJob {
  readonly op: 'follow';
  readonly path: string;
  readonly port: MessagePort;
}

/** `end`: the spool is complete, with that many bytes. */
export type FollowMessage = { readonly settledBytes: number; readonly end?: boolean };

export interface FollowResult extends ChunkResult {
  readonly hex: string;
}

export type Job = SpoolJob | DigestJob | ChunkJob | FollowJob;

export interface JobResults {
  readonly spool: SpoolResult;
  readonly digest: string;
  readonly chunks: ChunkResult;
  readonly follow: FollowResult;
}

export type WorkerRequest = { readonly id: number; readonly job: Job };

export type WorkerReply =
  | { readonly id: number; readonly kind: 'progress'; readonly doneBytes: number }
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
