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
  const how = way === undefined ? '' : way === 'quota' ? 'by quota; ' : 'by image; ';
  return {
    name: 'disk limits',
    present: way !== undefined,
    detail: `${how}${folder}: ${detail}`,
    usedFor: '--disk, by project quotas, or by an ext4 image on a loop device for each sandbox that is limited',
    fallback: '--disk is refused',
  };
}
