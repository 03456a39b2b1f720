/** One disk under one name, as clients see it. */
import { fail } from '../../errors.ts';
import type { BlockTarget } from '../block-target.ts';
import { extentsOf, immediateOf, prefetchOf } from '../capabilities.ts';
import { MAX_STRING_BYTES, TRANSMISSION } from './protocol.ts';

export interface NbdExport {
  /** '' is the default export, which clients get that name none. */
  readonly name: string;
  readonly target: BlockTarget;
  readonly description?: string;
  /** Refuses writes even where the target takes them. */
  readonly readOnly?: boolean;
}

/** An export with what was found out about it once. */
export interface OpenExport {
  readonly name: string;
  readonly description: string;
  readonly target: BlockTarget;
  readonly readOnly: boolean;
  readonly immediate: ReturnType<typeof immediateOf>;
  readonly extents: ReturnType<typeof extentsOf>;
  readonly prefetch: ReturnType<typeof prefetchOf>;
  /** Transmission flags but DF, which goes with structured replies. */
  readonly flags: number;
}

export function openExport(given: NbdExport): OpenExport {
  const { name, target, description = '' } = given;
  if (Buffer.byteLength(name) > 255) throw fail('NBD_EXPORT_NAME', { name, problem: 'longer than 255 bytes' });
  if (name.includes('\0')) throw fail('NBD_EXPORT_NAME', { name: JSON.stringify(name), problem: 'has a NUL byte' });
  const readOnly = target.readOnly || given.readOnly === true;
  const prefetch = prefetchOf(target);
  // A target's flush covers every write that was answered, whoever sent it: that is what CAN_MULTI_CONN promises.
  let flags = TRANSMISSION.HAS_FLAGS | TRANSMISSION.CAN_MULTI_CONN | TRANSMISSION.SEND_FLUSH;
  if (prefetch !== undefined) flags |= TRANSMISSION.SEND_CACHE;
  if (readOnly) flags |= TRANSMISSION.READ_ONLY;
  else flags |= TRANSMISSION.SEND_FUA | TRANSMISSION.SEND_TRIM | TRANSMISSION.SEND_WRITE_ZEROES;
  return {
    name,
    description: Buffer.from(description).subarray(0, MAX_STRING_BYTES).toString(),
    target,
    readOnly,
    immediate: immediateOf(target),
    extents: extentsOf(target),
    prefetch,
    flags,
  };
}
