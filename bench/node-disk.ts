/**
 * A disk that only one node writes to: an ext4 on a loop device, so that the kernel counts that node's writes and nobody else's.
 */
import { execFileSync } from 'node:child_process';
import { closeSync, ftruncateSync, mkdirSync, openSync, readFileSync, rmSync } from 'node:fs';
import { basename } from 'node:path';
import { readMountInfo, umount } from '#linux';

export interface DiskWrites {
  readonly bytes: number;
  /** Write requests that the device completed. */
  readonly requests: number;
}

const SECTOR_BYTES = 512;

export class NodeDisk {
  readonly mountPoint: string;
  readonly #file: string;
  readonly #device: string;

  private constructor(mountPoint: string, file: string, device: string) {
    this.mountPoint = mountPoint;
    this.#file = file;
    this.#device = device;
  }

  /** Mounted at `mountPoint`; the file beside it. */
  static make(mountPoint: string, sizeBytes: number): NodeDisk {
    const file = `${mountPoint}.ext4`;
    const fd = openSync(file, 'wx');
    ftruncateSync(fd, sizeBytes);
    closeSync(fd);
    // Everything is initialized now: what the kernel would do later in the background would count.
    execFileSync('mkfs.ext4', ['-q', '-m0', '-E', 'lazy_itable_init=0,lazy_journal_init=0', file]);
    mkdirSync(mountPoint);
    execFileSync('mount', ['-o', 'loop', file, mountPoint]);
    const device = basename(readMountInfo().find((row) => row.mountPoint === mountPoint)!.source);
    return new NodeDisk(mountPoint, file, device);
  }

  /** Since the disk was made. What is not written yet is written first. */
  syncedWrites(): DiskWrites {
    execFileSync('sync', ['-f', this.mountPoint]);
    return this.writes();
  }

  writes(): DiskWrites {
    for (const line of readFileSync('/proc/diskstats', 'latin1').split('\n')) {
      const fields = line.trim().split(/\s+/);
      if (fields[2] === this.#device) return { requests: Number(fields[7]), bytes: Number(fields[9]) * SECTOR_BYTES };
    }
    throw new Error(`/proc/diskstats does not show ${this.#device}`);
  }

  remove(): void {
    umount(this.mountPoint, { lazy: true });
    rmSync(this.#file, { force: true });
  }
}
