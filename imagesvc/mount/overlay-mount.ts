/**
 * Layers as one tree: OverlayFS, topmost layer first, with or without a writable upper.
 *
 * Options, and why:
 * - `xino=on`: every inode number is unique within the mount, stays the same across copy-up and remounts, and st_dev is
 *   one for the whole tree. With `off` files show their layer's st_dev and folders get a new number whenever they are
 *   looked up afresh: `find -xdev`, `du` and hard link detection would go wrong. `auto` gives up on EROFS's 64-bit handles.
 * - `index=off`, `metacopy=off`, `redirect_dir=nofollow`: the upper alone tells all that changed, as plain files, so that
 *   pack-diff needs nothing else to read it; and no attribute inside an untrusted layer redirects a lookup. The price:
 *   writing through one name of a hard link in a lower layer parts it from its other names, as in every container engine.
 * - no `userxattr`: whiteouts and opaque marks are in trusted.*, which code in a sandbox cannot write.
 *
 * Values go through fsconfig one by one (kernel 6.5): no separators, nothing is cut. Older kernels get one option string,
 * refused when it is longer than the kernel reads.
 */
import { closeSync, constants, openSync } from 'node:fs';
import {
  createMount,
  type DetachedMount,
  FSCONFIG_STRING_LIMIT_BYTES,
  type MountParameter,
  mount,
  SyscallError,
} from '#linux';
import { fail } from '../errors.ts';
import { composeMapped, type IdMapping } from './mapped-overlay.ts';
import { refusal } from './refusal.ts';

/** The kernel's OVL_MAX_STACK. */
export const MAX_LOWER_LAYERS = 500;

const OPTIONS: readonly (readonly [string, string])[] = [
  ['xino', 'on'],
  ['index', 'off'],
  ['metacopy', 'off'],
  ['redirect_dir', 'nofollow'],
];

export interface OverlaySpec {
  /** Absolute paths, topmost first. At least one with an upper, at least two without. */
  readonly lowers: readonly string[];
  readonly upper?: string;
  /** An empty folder on the upper's file system. With `upper` only. */
  readonly work?: string;
  /** Nothing of the upper is written out for the mount's sake: see `MountOptions.volatile`. */
  readonly volatile?: boolean;
  /** What the mount table shows as the mount's source. */
  readonly source: string;
  /** Owners are shifted; `stage`: a folder of the node for that. */
  readonly mapping?: IdMapping & { readonly stage: string };
}

/** Not attached yet; or, on a kernel that cannot do that, a step that mounts at the target at once. */
export type ComposedMount =
  | { readonly kind: 'detached'; readonly mount: DetachedMount }
  | { readonly kind: 'direct'; attach(): void };

/**
 * @param api `mount2` leaves the new mount API out (for tests)
 * @throws MOUNT_TOO_MANY_LAYERS, MOUNT_FEATURE_MISSING, MOUNT_DENIED, MOUNT_REFUSED
 */
export function composeOverlay(spec: OverlaySpec, target: string, api: 'auto' | 'mount2' = 'auto'): ComposedMount {
  if (spec.lowers.length > MAX_LOWER_LAYERS) {
    throw fail('MOUNT_TOO_MANY_LAYERS', { target, layers: spec.lowers.length, limit: MAX_LOWER_LAYERS });
  }
  const what = `OverlayFS of ${spec.lowers.length} layers${spec.upper === undefined ? '' : ` and upper ${spec.upper}`}`;
  if (api === 'auto') {
    try {
      return { kind: 'detached', mount: createOverlay(spec) };
    } catch (error) {
      if (!lacksLowerdirPlus(error)) throw refusal(error, what, target);
    }
  }
  if (spec.mapping !== undefined) {
    const reason = 'this kernel takes layers by mount(2) alone; that takes Linux 6.5';
    throw fail('MOUNT_ID_MAPPING', { path: target, reason });
  }
  const options = optionString(spec);
  return {
    kind: 'direct',
    attach() {
      try {
        mount(spec.source, target, 'overlay', 0, options);
      } catch (error) {
        throw refusal(error, what, target);
      }
    },
  };
}

/** Before 6.5 `lowerdir+` is an unknown parameter; fsopen itself may be kept out by a seccomp profile. */
function lacksLowerdirPlus(error: unknown): boolean {
  if (!(error instanceof SyscallError)) return false;
  if (error.syscall === 'fsopen') return error.code === 'ENOSYS';
  return error.syscall === 'fsconfig' && error.code === 'EINVAL' && String(error.params.path).startsWith('lowerdir+=');
}

function createOverlay(spec: OverlaySpec): DetachedMount {
  const { mapping } = spec;
  if (mapping === undefined) return createPlain(spec);
  return composeMapped(spec, mapping, mapping.stage, (paths) => createPlain({ ...spec, ...paths }));
}

function createPlain(spec: OverlaySpec): DetachedMount {
  const held: number[] = [];
  // fsconfig takes 255 bytes a value, and OverlayFS undoes backslashes in some: such a path goes by a descriptor's name.
  const value = (path: string): string => {
    if (Buffer.byteLength(path) <= FSCONFIG_STRING_LIMIT_BYTES && !path.includes('\\')) return path;
    const fd = openSync(path, constants.O_RDONLY | constants.O_DIRECTORY);
    held.push(fd);
    return `/proc/self/fd/${fd}`;
  };
  try {
    const parameters: MountParameter[] = [
      ['source', spec.source],
      ...OPTIONS,
      ...spec.lowers.map((path) => ['lowerdir+', value(path)] as const),
    ];
    if (spec.upper !== undefined && spec.work !== undefined) {
      parameters.push(['upperdir', value(spec.upper)], ['workdir', value(spec.work)]);
      if (spec.volatile === true) parameters.push(['volatile']);
    } else {
      parameters.push(['ro']);
    }
    return createMount('overlay', parameters);
  } finally {
    for (const fd of held) closeSync(fd);
  }
}

function optionString(spec: OverlaySpec): string {
  const lowers = spec.lowers.map((path) => path.replace(/[\\,:]/g, '\\$&')).join(':');
  const options = [...OPTIONS.map(([key, value]) => `${key}=${value}`), `lowerdir=${lowers}`];
  if (spec.upper !== undefined && spec.work !== undefined) {
    const escaped = (path: string) => path.replace(/[\\,]/g, '\\$&');
    options.push(`upperdir=${escaped(spec.upper)}`, `workdir=${escaped(spec.work)}`);
  }
  return options.join(',');
}
