/** Which processes keep a mount busy: for the message, when the kernel refuses to unmount. Best effort. */
import { readdirSync, readFileSync, statSync } from 'node:fs';

/** `1234 (bash)`, at most `limit` of them, for the file system whose `st_dev` is `device`. */
export function usersOf(device: number, limit = 5): string[] {
  const found: string[] = [];
  for (const pid of readdirSync('/proc')) {
    if (!/^\d+$/.test(pid) || found.length >= limit) continue;
    if (uses(pid, device)) found.push(`${pid} (${nameOf(pid)})`);
  }
  return found;
}

function uses(pid: string, device: number): boolean {
  const lies = (path: string): boolean => {
    try {
      return statSync(path).dev === device;
    } catch {
      return false;
    }
  };
  if (lies(`/proc/${pid}/cwd`) || lies(`/proc/${pid}/root`) || lies(`/proc/${pid}/exe`)) return true;
  try {
    return readdirSync(`/proc/${pid}/fd`).some((fd) => lies(`/proc/${pid}/fd/${fd}`));
  } catch {
    return false;
  }
}

function nameOf(pid: string): string {
  try {
    return readFileSync(`/proc/${pid}/comm`, 'utf8').trim();
  } catch {
    return '?';
  }
}
