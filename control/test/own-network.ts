/** This process, and all that it starts, in a network namespace of its own: networks of sandboxes are the machine's, and there can be one node that makes them. */
import { execFileSync } from 'node:child_process';
import { createRequire } from 'node:module';

const CLONE_NEWNET = 0x40000000;

/** It does not come back. */
export function takeOwnNetwork(): void {
  const koffi = createRequire(import.meta.url)('koffi');
  const unshare = koffi.load(null).func('unshare', 'int', ['int']) as (flags: number) => number;
  if (unshare(CLONE_NEWNET) !== 0) throw new Error('no network namespace');
  execFileSync('ip', ['link', 'set', 'lo', 'up']);
}
