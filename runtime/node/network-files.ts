/** Files of this machine that a sandbox sees because of its network: where names are resolved, and who localhost is. */
import { shownFiles } from '../network/machine-network.ts';
import type { NetworkFacts } from '../network/network-facts.ts';
import { type MountPoint, missingMountPoints } from '../sandbox/mount-points.ts';
import { resolveInRoot } from '../sandbox/root-path.ts';

const RESOLVER = '/etc/resolv.conf';
const HOSTS = '/etc/hosts';

export interface NetworkFiles {
  /** To be made. */
  readonly missing: readonly MountPoint[];
  /** All of them, for a root whose points are made elsewhere. */
  readonly shown: readonly { readonly source: string; readonly target: string }[];
  /** Once they are there. */
  readonly binds: () => readonly { readonly source: string; readonly target: string }[];
}

/** @param root Where it is mounted. */
export function networkFiles(network: NetworkFacts | undefined, runDir: string, root: string): NetworkFiles {
  const shown = shownIn(network, runDir, root);
  const points = shown.map(({ target }): MountPoint => ({ path: target, kind: 'file' }));
  const isBare = points.length > 0 && resolveInRoot(root, '/etc')?.stat === undefined;
  return {
    shown,
    missing: isBare ? [{ path: '/etc', kind: 'folder' }, ...points] : missingMountPoints(root, points),
    // An image may have a folder there.
    binds: () => shown.filter(({ target }) => resolveInRoot(root, target)?.stat?.isFile() === true),
  };
}

function shownIn(network: NetworkFacts | undefined, runDir: string, root: string) {
  if (network === undefined) return [];
  if (network.mode === 'host') return [RESOLVER, HOSTS].map((path) => ({ source: path, target: path }));
  const { resolver, hosts } = shownFiles(runDir);
  const own = resolveInRoot(root, HOSTS)?.stat;
  // Without any, localhost would be a name to ask the resolver for.
  const hasHosts = own !== undefined && own.size > 0;
  return [{ source: resolver, target: RESOLVER }, ...(hasHosts ? [] : [{ source: hosts, target: HOSTS }])];
}
