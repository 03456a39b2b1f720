/**
 * How requests for blobs come from the kernel and answers go back. Two of them, held to the same tests:
 * - raw (raw-transport.ts): the kernel's protocol on /dev/fuse. The descriptor belongs to whoever mounted (the supervisor),
 *   so the server may die and be replaced.
 * - native (native-transport.ts): fuse-native over libfuse 2, for where mount(2) is not allowed but fusermount is. Slower,
 *   and its mount dies with its process.
 */
import type { BlobReader, ServedBlob } from './served-blob.ts';

export interface TransportStats {
  /** READ requests. */
  readonly reads: number;
  /** Of these, answered by the thread that took them. */
  readonly hits: number;
  /** Answered with an error. */
  readonly failures: number;
  readonly readBytes: number;
  /** Requests that an earlier server had taken and not answered. */
  readonly resent: number;
  readonly largestReadBytes: number;
}

export interface Transport {
  readonly kind: 'raw' | 'native';
  /** The blob can be opened by the time this returns. */
  add(blob: ServedBlob): void;
  stats(): TransportStats;
  /** When the file system is unmounted. */
  readonly ended: Promise<void>;
}

export interface TransportOptions {
  readonly blobs: readonly ServedBlob[];
  readonly reader: BlobReader;
}
