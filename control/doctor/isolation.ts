/** What sandboxes are kept apart by on this machine, beyond what every kernel has. */
import { readFileSync } from 'node:fs';
import { atLeast, type Feature } from '#linux';
import { appArmor, runtimeFolders, usernsSupport } from '#runtime';

export async function isolationRows(): Promise<Feature[]> {
  const { lacks } = await usernsSupport(runtimeFolders());
  const isRoot = process.geteuid?.() === 0;
  const armor = isRoot ? appArmor() : { lacks: 'it takes root' };
  return [
    {
      name: 'user namespaces',
      present: lacks === undefined,
      detail: lacks ?? 'a range of ids for each sandbox, owners shifted by mounts',
      usedFor: "a sandbox's root user is nobody outside",
      fallback: 'it is root, without the capabilities that matter; as with --userns host',
    },
    {
      name: 'AppArmor',
      present: armor.profile !== undefined,
      detail: armor.profile ?? armor.lacks ?? '',
      usedFor: 'a second wall around mounts, /proc and /sys of sandboxes',
      fallback: 'mounts, capabilities and the system call filter alone',
    },
    {
      name: 'Landlock scopes',
      present: atLeast(6, 12) && kernelHasLandlock(),
      detail: 'by version',
      usedFor: 'no signals and abstract sockets from a sandbox to the machine (dsec-agent alone)',
      fallback: "namespaces alone: with --network host the machine's abstract sockets can be reached",
    },
  ];
}

/** Without the list of security modules nobody can say more than the version does. */
function kernelHasLandlock(): boolean {
  try {
    return readFileSync('/sys/kernel/security/lsm', 'latin1').split(',').includes('landlock');
  } catch {
    return true;
  }
}
