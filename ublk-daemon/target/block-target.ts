/**
 * What every way out (NBD, ublk, a file) serves: one block device, whatever it is made of.
 *
 * - Offsets and lengths are bytes, multiples of `blockSize`, inside `sizeBytes`; anything else is refused before it has an effect.
 * - A read gives exactly `length` bytes, or an error. What was never written reads as zeros.
 * - A write that has been answered is seen by every read begun after it. Two writes to one block at the same time: one of them stays.
 * - `flush` answers when everything answered before it was called survives a crash of process and machine. `fua` asks the same of one
 *   write alone.
 * - `discard` says that nobody needs the range any more: it reads as zeros afterwards, here. `writeZeroes` makes zeros that
 *   count as written; with `mayUnmap` (the default) they need take no room.
 * - The data of a write is the caller's again when the write is answered.
 * - Errors carry `code` as errno names it where a client knows one: `ENOSPC`, `EIO`, `EPERM` (read-only), `EINVAL`. A failed write may
 *   have changed the range in part, as on a disk; nothing else has changed, and reads go on.
 * - `close` flushes, and is the last call; what is in flight is finished first.
 */
export interface BlockTarget {
  readonly sizeBytes: number;
  readonly blockSize: 512 | 4096;
  readonly readOnly: boolean;
  read(offset: number, length: number): Promise<Buffer>;
  write(offset: number, data: Buffer, options?: { fua?: boolean }): Promise<void>;
  flush(): Promise<void>;
  discard(offset: number, length: number): Promise<void>;
  writeZeroes(offset: number, length: number, options?: { mayUnmap?: boolean; fua?: boolean }): Promise<void>;
  close(): Promise<void>;
}
