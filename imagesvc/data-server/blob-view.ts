/** Opens what a `ViewHandle` names, in whatever thread: bytes that are there already, at once. */
import { closeSync, openSync, readSync } from 'node:fs';
import { ChunkView, type ChunkViewHandle } from '#chunk-cache';
import { ReadLog, type ReadLogHandle } from './read-log.ts';
import type { ViewHandle } from './served-blob.ts';

export interface BlobView {
  /** Puts `length` bytes from `offset` into `target` at `at`; false when not all of them are there at once. */
  readInto(target: Buffer, at: number, offset: number, length: number): boolean;
  close(): void;
}

const NOTHING: BlobView = { readInto: () => false, close() {} };

/** Never throws: what cannot be opened has nothing at once, and the reader finds out why. */
export function openView(handle: ViewHandle): BlobView {
  const view = openOf(handle);
  return handle.log === undefined ? view : logged(view, handle.log);
}

/** Every read passes a view first, whoever answers it in the end. */
function logged(view: BlobView, { shared, node }: ReadLogHandle): BlobView {
  const log = new ReadLog(shared);
  return {
    readInto(target, at, offset, length) {
      log.add(node, offset, length);
      return view.readInto(target, at, offset, length);
    },
    close: () => view.close(),
  };
}

function openOf(handle: ViewHandle): BlobView {
  if (handle.kind === 'file') return openFile(handle.path);
  return handle.kind === 'chunks' ? openChunks(handle.chunks) : NOTHING;
}

function openChunks(handle: ChunkViewHandle): BlobView {
  const view = new ChunkView(handle);
  return {
    readInto: (target, at, offset, length) => view.readNowInto(target, at, offset, length) === length,
    close: () => view.close(),
  };
}

function openFile(path: string): BlobView {
  let fd: number;
  try {
    fd = openSync(path, 'r');
  } catch {
    return NOTHING;
  }
  return {
    readInto(target, at, offset, length) {
      try {
        for (let done = 0; done < length; ) {
          const got = readSync(fd, target, at + done, length - done, offset + done);
          if (got === 0) return false;
          done += got;
        }
        return true;
      } catch {
        return false;
      }
    },
    close: () => closeSync(fd),
  };
}
