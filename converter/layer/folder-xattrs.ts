/**
 * Extended attributes of a file on this machine, as a layer carries them: without what OverlayFS keeps for itself and
 * without what describes this host rather than the file (labels and signatures of its security modules).
 */
import { type ByteString, byteString } from '#base';
import { lgetxattr, llistxattr } from '#linux';

export interface OverlayMarks {
  readonly opaque: boolean;
  readonly whiteout: boolean;
  /** The inode only makes sense together with the layers below: a renamed directory, or a file without its data. */
  readonly redirect: boolean;
}

const NO_MARKS: OverlayMarks = { opaque: false, whiteout: false, redirect: false };

/** Attributes of the host, not of the file. */
const OF_THE_HOST = new Set(['security.selinux', 'security.ima', 'security.evm']);

export function readXattrs(
  path: Buffer,
  overlay: 'trusted' | 'user' | undefined,
): { xattrs: Map<ByteString, Buffer> | undefined; marks: OverlayMarks } {
  const names = llistxattr(path);
  if (names.length === 0) return { xattrs: undefined, marks: NO_MARKS };
  const prefix = `${overlay ?? 'trusted'}.overlay.`;
  const escaped = `${prefix}overlay.`;
  const marks = { opaque: false, whiteout: false, redirect: false };
  const xattrs = new Map<ByteString, Buffer>();
  for (const name of [...names].sort()) {
    if (OF_THE_HOST.has(name) || name.startsWith('btrfs.') || name === 'system.nfs4_acl') continue;
    // A nested overlay's own attributes: OverlayFS stores them escaped and wants to find them so in a lower layer.
    const nested = overlay !== undefined && name.startsWith(escaped);
    if (name.startsWith(prefix) && !nested) {
      if (overlay === undefined) continue;
      const what = name.slice(prefix.length);
      if (what === 'redirect' || what === 'metacopy') marks.redirect = true;
      else if (what === 'whiteout') marks.whiteout = true;
      else if (what === 'opaque') marks.opaque = byteString(lgetxattr(path, name) ?? Buffer.alloc(0)) === 'y';
      continue;
    }
    // Plain `trusted.overlay.*` of another flavour must not come to mean something in our mounts.
    if (name.startsWith('trusted.overlay.') && !nested) continue;
    const value = lgetxattr(path, name);
    if (value !== undefined) xattrs.set(name, value);
  }
  return { xattrs: xattrs.size > 0 ? xattrs : undefined, marks };
}
