/** Which limits sandboxes can have on this machine, and what holds them. */
import { existsSync } from 'node:fs';
import { dirname } from 'node:path';
import { messageOf } from '#base';
import type { Feature } from '#linux';
import { diskWay, limitSupport, runtimeFolders } from '#runtime';

export function limitRows(): Feature[] {
  return [controllersRow(), diskRow()];
}

function controllersRow(): Feature {
  const row = {
    name: 'limits',
    usedFor: '--cpus, --memory, --pids, --io-...',
    fallback: 'a limit that is missing is refused',
  };
  try {
    const { version, missing, swap } = limitSupport();
    const without = [...missing, ...(swap ? [] : ['swap'])];
    const detail = `control groups v${version}${without.length === 0 ? '' : `, without ${without.join(', ')}`}`;
    return { ...row, present: missing.length === 0, detail };
  } catch (error) {
    return { ...row, present: false, detail: messageOf(error) };
  }
}

function diskRow(): Feature {
  let folder = runtimeFolders().stateDir;
  while (!existsSync(folder)) folder = dirname(folder);
  const { way, detail } = diskWay(folder);
  const fallback =
    'an ext4 image for each sandbox that is limited, on a loop device; without e2fsprogs --disk is refused';
  return {
    name: 'disk limits',
    present: way === 'quota',
    detail: `${folder}: ${detail}`,
    usedFor: '--disk, by project quotas',
    fallback,
  };
}
