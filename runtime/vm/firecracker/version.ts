/**
 * Which Firecracker this is, and whether we use it. What a release cannot do, or does wrong in a way that a sandbox would notice, is one row here, with
 * where Firecracker's own tracker tells of it: a version that is refused names its reason, and nothing tries to work around it.
 *
 * The one to take: 1.15.1.
 */

export interface FirecrackerVersion {
  readonly major: number;
  readonly minor: number;
  readonly patch: number;
}

export const RECOMMENDED_FIRECRACKER = '1.15.1';

interface Flaw {
  /** From here on, this one too. */
  readonly from: string;
  /** Up to here, without it. */
  readonly before: string;
  readonly what: string;
}

const FLAWS: readonly Flaw[] = [
  {
    from: '0.0.0',
    before: '1.14.0',
    what: 'it has neither virtio-pmem nor free page reporting (both came with 1.14.0)',
  },
  {
    from: '1.14.0',
    before: '1.14.4',
    what: 'a guest can make it allocate memory without bound (pull request 5762), and before 1.14.2 a differential snapshot of more than 3 GiB is wrong (5705)',
  },
  {
    from: '1.15.0',
    before: '1.15.1',
    what: 'a guest can make it allocate memory without bound (pull request 5762)',
  },
  {
    from: '1.16.0',
    before: '1.16.1',
    what: 'a guest that is restored from a snapshot answers no more over vsock (issue 5969)',
  },
  {
    from: '1.16.1',
    before: '1.17.0',
    what: 'a machine that stood still without a snapshot, so also after one that failed, takes no connection over vsock any more (issue 6074, pull request 6100)',
  },
  { from: '2.0.0', before: '9999.0.0', what: 'its interface is not known to this version of dsec' },
];

/** Of what `firecracker --version` says, or its API. Undefined: it says no version. */
export function parseFirecrackerVersion(text: string): FirecrackerVersion | undefined {
  const found = /(?:^|\bv| )(\d{1,4})\.(\d{1,4})\.(\d{1,4})(-[\w.]+)?/m.exec(text);
  if (found === null) return undefined;
  const [major, minor, patch] = [Number(found[1]), Number(found[2]), Number(found[3])];
  return { major, minor, patch };
}

export function versionText({ major, minor, patch }: FirecrackerVersion): string {
  return `${major}.${minor}.${patch}`;
}

/** Why it is not used; undefined: it is. */
export function flawOf(version: FirecrackerVersion): string | undefined {
  const isFrom = (text: string) => compare(version, parseFirecrackerVersion(text)!) >= 0;
  return FLAWS.find(({ from, before }) => isFrom(from) && !isFrom(before))?.what;
}

function compare(a: FirecrackerVersion, b: FirecrackerVersion): number {
  return a.major - b.major || a.minor - b.minor || a.patch - b.patch;
}
