/** Between two runs: what the last one left to write is written, so that the next does not pay for it. */
import { spawnSync } from 'node:child_process';

export function settle(): void {
  spawnSync('sync');
}
