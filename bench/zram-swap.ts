/** A swap device of a benchmark's own, compressed and in memory: added, and taken away again whatever happened. */
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { swapSpace } from '#linux';

const CONTROL = '/sys/class/zram-control';

/** Why it cannot be had. */
export function zramMissing(): string | undefined {
  if (!existsSync(CONTROL)) return 'zram is not loaded (modprobe zram)';
  const used = swapSpace().places;
  return used.length === 0
    ? undefined
    : `swap is in use already (${used.join(', ')}): what it holds would be measured too`;
}

export class ZramSwap {
  readonly number: number;

  private constructor(number: number) {
    this.number = number;
  }

  static start(sizeBytes: number): ZramSwap {
    // Reading it makes a device.
    const swap = new ZramSwap(Number(readFileSync(`${CONTROL}/hot_add`, 'latin1')));
    try {
      writeFileSync(`${swap.folder}/disksize`, String(sizeBytes));
      run('mkswap', swap.path);
      run('swapon', swap.path);
    } catch (error) {
      swap.stop();
      throw error;
    }
    return swap;
  }

  private get folder(): string {
    return `/sys/block/zram${this.number}`;
  }
  get path(): string {
    return `/dev/zram${this.number}`;
  }

  /** What it takes itself. */
  memoryBytes(): number {
    return Number(readFileSync(`${this.folder}/mm_stat`, 'latin1').trim().split(/\s+/)[2]);
  }

  stop(): void {
    if (swapSpace().places.includes(this.path)) run('swapoff', this.path);
    writeFileSync(`${this.folder}/reset`, '1');
    writeFileSync(`${CONTROL}/hot_remove`, String(this.number));
  }
}

function run(program: string, device: string): void {
  const path = `${process.env.PATH ?? ''}:/usr/sbin:/sbin`;
  const { status, stderr } = spawnSync(program, [device], { env: { PATH: path }, encoding: 'utf8' });
  if (status !== 0) throw new Error(`${program} ${device}: ${stderr}`);
}
