/**
 * Proof that a file is the blob its digest names. The kernel checks nothing: a wrong device file of the right size mounts
 * and reads as wrong bytes. So each file is hashed before it is mounted, once: the proof is remembered together with
 * (device, inode, size, mtime, ctime) and holds while all of them stay the same.
 *
 * A proof is a small file, `<cache>/proofs/<hex>-<dev>-<ino>`. Whoever hashes holds a lock on it, so that many processes
 * that mount one image at once hash its blobs once. A damaged proof is no proof.
 */

import { createHash } from 'node:crypto';
import {
  type BigIntStats,
  closeSync,
  constants,
  fstatSync,
  ftruncateSync,
  mkdir,
  openSync,
  read as readCallback,
  readFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { promisify } from 'node:util';
import { type Digest, digestFromHex, hexOf, isDsecError, messageOf, systemCode } from '#base';
import { lock } from '#linux';
import { fail } from '../errors.ts';

const readAsync = promisify(readCallback);
const mkdirAsync = promisify(mkdir);

/**
 * A change within the clock tick of the last one leaves the same ctime. A proof is remembered only once the last change
 * is older than the coarsest tick (10 ms at CONFIG_HZ=100), so that any later one shows.
 */
const TICK_MS = 20;

/** How often a file that keeps changing is hashed. */
const MAX_PASSES = 3;

/** A file held open: what was proved is what is mounted, whatever happens to its name meanwhile. */
export interface ProvenFile {
  /** Where it was found: for messages. */
  readonly path: string;
  readonly fd: number;
  /** Names this very file to the kernel, short and without commas or colons, while `fd` is open. */
  readonly kernelPath: string;
  /** Safe to call twice. */
  close(): void;
}

/**
 * Opens `path` and proves it. Nothing stays open when it fails.
 * @throws MOUNT_BLOB_MISSING, MOUNT_DIGEST_MISMATCH
 */
export async function openProven(
  path: string,
  digest: Digest,
  sizeBytes: number,
  cacheDir: string,
): Promise<ProvenFile> {
  const file = openBlob(path, digest);
  try {
    const stat = fstatSync(file.fd, { bigint: true });
    if (stat.size !== BigInt(sizeBytes)) {
      throw fail('MOUNT_DIGEST_MISMATCH', {
        path,
        digest,
        found: `${stat.size} bytes instead of ${sizeBytes}`,
      });
    }
    await prove(file, digest, stat, cacheDir);
    return file;
  } catch (error) {
    file.close();
    throw error;
  }
}

/** Opens `path` unproved: its server verifies each byte. */
export function openBlob(path: string, digest: Digest): ProvenFile {
  let fd: number;
  try {
    fd = openSync(path, constants.O_RDONLY);
  } catch (error) {
    throw fail('MOUNT_BLOB_MISSING', { path, digest, reason: messageOf(error) }, error);
  }
  let open = true;
  return {
    path,
    fd,
    kernelPath: `/proc/self/fd/${fd}`,
    close() {
      if (!open) return;
      open = false;
      closeSync(fd);
    },
  };
}

/**
 * For a publisher that has just hashed `path` at its final place: remembers the proof, so that the first mount need not
 * read the blob again. Best effort: a cache that cannot be written is no error.
 */
export async function recordProof(path: string, digest: Digest, cacheDir: string): Promise<void> {
  try {
    const fd = openSync(path, constants.O_RDONLY);
    try {
      const before = fstatSync(fd, { bigint: true });
      for (let wait = 0; wait < 4 && !settled(before); wait++) await delay(TICK_MS / 2);
      const after = fstatSync(fd, { bigint: true });
      if (!settled(after) || fingerprint(before) !== fingerprint(after)) return;
      const held = await lockProof(proofPath(cacheDir, digest, after), cacheDir);
      try {
        writeProof(held.fd, after);
      } finally {
        held.release();
      }
    } finally {
      closeSync(fd);
    }
  } catch {
    // The next mount hashes instead.
  }
}

async function prove(file: ProvenFile, digest: Digest, stat: BigIntStats, cacheDir: string): Promise<void> {
  const proof = proofPath(cacheDir, digest, stat);
  if (remembered(proof, stat)) return;
  // Without a usable cache there is nothing to remember in, and each mount hashes.
  const held = await lockProof(proof, cacheDir).catch((error: unknown) => {
    if (systemCode(error) === undefined || isDsecError(error)) throw error;
    return undefined;
  });
  try {
    // Somebody else may have hashed it while we waited.
    let before = fstatSync(file.fd, { bigint: true });
    if (remembered(proof, before)) return;
    for (let pass = 1; ; pass++) {
      const found = await hashFile(file.fd);
      if (found !== digest) {
        throw fail('MOUNT_DIGEST_MISMATCH', { path: file.path, digest, found: `digest ${found}` });
      }
      const after = fstatSync(file.fd, { bigint: true });
      if (fingerprint(after) === fingerprint(before)) {
        if (held !== undefined && settled(after)) writeProof(held.fd, after);
        return;
      }
      // Its publisher dropped the other link, or somebody touched it; or its bytes changed behind the hash, which
      // another pass would tell. Right on each pass, it is the blob, but nothing to remember.
      if (pass === MAX_PASSES) return;
      before = after;
    }
  } finally {
    held?.release();
  }
}

async function hashFile(fd: number): Promise<Digest> {
  const hash = createHash('sha256');
  const buffer = Buffer.allocUnsafe(1024 * 1024);
  for (let position = 0; ; ) {
    const { bytesRead } = await readAsync(fd, buffer, 0, buffer.length, position);
    if (bytesRead === 0) return digestFromHex(hash.digest('hex'));
    hash.update(buffer.subarray(0, bytesRead));
    position += bytesRead;
  }
}

function proofPath(cacheDir: string, digest: Digest, stat: BigIntStats): string {
  return join(cacheDir, 'proofs', `${hexOf(digest)}-${stat.dev}-${stat.ino}`);
}

/** Waits as long as hashing a very large blob may take. */
async function lockProof(proof: string, cacheDir: string) {
  await mkdirAsync(join(cacheDir, 'proofs'), { recursive: true, mode: 0o700 });
  return lock(proof, { timeoutMs: 30 * 60_000 });
}

function fingerprint(stat: BigIntStats): string {
  return `${stat.dev}:${stat.ino}:${stat.size}:${stat.mtimeNs}:${stat.ctimeNs}`;
}

function settled(stat: BigIntStats): boolean {
  return BigInt(Date.now() - TICK_MS) * 1_000_000n > stat.ctimeNs;
}

/** One line that ends in a newline: a write that was cut short is not taken for a proof. */
function remembered(proof: string, stat: BigIntStats): boolean {
  try {
    return readFileSync(proof, 'latin1') === `${fingerprint(stat)}\n`;
  } catch {
    return false;
  }
}

function writeProof(fd: number, stat: BigIntStats): void {
  ftruncateSync(fd, 0);
  writeSync(fd, `${fingerprint(stat)}\n`, 0, 'latin1');
}
