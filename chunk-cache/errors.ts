/** Every error this folder makes. Kept alphabetical; docs/errors.md lists the same rows. */
import { type ErrorRow, errorTable } from '#base';

export const chunkCacheErrors = {
  CACHE_BUSY: {
    message: '{folder}: the chunk cache is in use by process {pid}',
    hint: 'one process owns a cache folder at a time: stop process {pid}, or give this one a folder of its own ($DSEC_CACHE)',
    retryable: true,
    exit: 1,
    http: 503,
  },
  CACHE_CHUNK_MISMATCH: {
    message:
      'blob {blob}: chunk {chunk} (bytes {start} to {end}) came {tries} times with other bytes than its digest says: sha256 {actual}, expected {expected}',
    hint: 'the store holds or sends a damaged blob: run `dsec verify` on the image and push it again if it fails',
    exit: 6,
    http: 502,
  },
  CACHE_CLOSED: {
    message: '{folder}: the chunk cache has been closed',
    hint: 'open the cache again',
    retryable: true,
    exit: 1,
    http: 503,
  },
  CACHE_FACTS: {
    message: 'blob {blob}: {problem}',
    hint: 'the chunk digests of an image are the blob that its manifest names right after the data blob',
    exit: 3,
    http: 400,
  },
  CACHE_FOLDER: {
    message: '{folder}: the chunk cache cannot be used: {problem}',
    hint: 'the folder must be on a local disk and writable; set $DSEC_CACHE to another one',
    exit: 5,
    http: 500,
  },
  CACHE_OPTION: {
    message: 'chunk cache: {name} = {value}: {problem}',
    exit: 2,
    http: 400,
  },
  CACHE_PINNED: {
    message: 'blob {blob} is in use and cannot be removed from the cache',
    hint: 'unmount the images that read it first',
    exit: 1,
    http: 409,
  },
  CACHE_READ_RANGE: {
    message: 'blob {blob}: offset {offset} and length {length} must be whole numbers from 0 on',
    exit: 2,
    http: 400,
  },
} as const satisfies Record<string, ErrorRow>;

export const fail = errorTable(chunkCacheErrors);
