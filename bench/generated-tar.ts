/**
 * Tars of any size, written to disk as they are made: many small files, or a few large ones. The same arguments give the same
 * bytes. Neither tar nor its digest is ever in memory.
 */
import { createCipheriv, createHash } from 'node:crypto';
import { closeSync, openSync, writeSync } from 'node:fs';
import { type Digest, digestFromHex } from '#base';
import { type Entry, tarHeader } from '#converter';
import type { LayoutLayer } from './image-layout.ts';

const MTIME = 1_700_000_000;
const BLOCK = 512;
const PIECE = 1 << 20;

/** In folders of a thousand, 100 to 3000 bytes each. */
export function writeManyFiles(path: string, count: number): LayoutLayer {
  const out = new TarFile(path);
  const text = Buffer.from('a line of some file, as long as most of them\n'.repeat(80));
  for (let i = 0; i < count; i++) {
    if (i % 1000 === 0) out.member(`many/folder-${i / 1000}`, 'dir', 0);
    const size = 100 + ((i * 7919) % 2900);
    out.member(`many/folder-${Math.floor(i / 1000)}/a-file-of-some-name-${i}.js`, 'file', size);
    // Content of its own: identical files are stored once.
    out.write(Buffer.from(String(i).padEnd(16)));
    out.write(text.subarray(0, size - 16));
    out.pad(size);
  }
  return out.close();
}

/** Of 256 MiB each, incompressible. */
export function writeLargeFiles(path: string, totalBytes: number): LayoutLayer {
  const out = new TarFile(path);
  const noise = createCipheriv('aes-128-ctr', Buffer.alloc(16, 1), Buffer.alloc(16));
  const zeros = Buffer.alloc(PIECE);
  out.member('large', 'dir', 0);
  for (let at = 0, i = 0; at < totalBytes; i++) {
    const size = Math.min(256 * PIECE, totalBytes - at);
    out.member(`large/file-${i}`, 'file', size);
    for (let left = size; left > 0; left -= PIECE) out.write(noise.update(zeros.subarray(0, Math.min(PIECE, left))));
    out.pad(size);
    at += size;
  }
  return out.close();
}

export class TarFile {
  readonly #path: string;
  readonly #fd: number;
  readonly #hash = createHash('sha256');
  #pieces: Buffer[] = [];
  #pending = 0;
  #sizeBytes = 0;

  constructor(path: string) {
    this.#path = path;
    this.#fd = openSync(path, 'w');
  }

  member(path: string, kind: 'file' | 'dir', sizeBytes: number): void {
    this.write(memberHeader(path, kind, sizeBytes));
  }

  write(bytes: Buffer): void {
    this.#pieces.push(bytes);
    this.#pending += bytes.length;
    if (this.#pending >= PIECE) this.#flush();
  }

  pad(sizeBytes: number): void {
    if (sizeBytes % BLOCK > 0) this.write(Buffer.alloc(BLOCK - (sizeBytes % BLOCK)));
  }

  close(): LayoutLayer {
    this.write(Buffer.alloc(2 * BLOCK));
    this.#flush();
    closeSync(this.#fd);
    const digest: Digest = digestFromHex(this.#hash.digest('hex'));
    return { path: this.#path, digest, diffId: digest, sizeBytes: this.#sizeBytes, compressed: false };
  }

  #flush(): void {
    const bytes = Buffer.concat(this.#pieces);
    for (let at = 0; at < bytes.length; ) at += writeSync(this.#fd, bytes, at);
    this.#hash.update(bytes);
    this.#sizeBytes += bytes.length;
    this.#pieces = [];
    this.#pending = 0;
  }
}

export function memberHeader(path: string, kind: 'file' | 'dir', sizeBytes: number): Buffer {
  const entry: Entry = {
    path,
    kind,
    mode: kind === 'dir' ? 0o755 : 0o644,
    uid: 0,
    gid: 0,
    mtimeSec: MTIME,
    mtimeNsec: 0,
    sizeBytes,
    target: '',
    major: 0,
    minor: 0,
    xattrs: undefined,
  };
  return tarHeader(entry);
}
