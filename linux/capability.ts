/** Capabilities of one thread. The kernel keeps them for each thread apart, and so does this. */
import { type NumberedCall, syscall } from './libc.ts';

const CAPGET: NumberedCall = { name: 'capget', number: { x64: 125, arm64: 90 }, args: ['void*', 'void*'] };
const CAPSET: NumberedCall = { name: 'capset', number: { x64: 126, arm64: 91 }, args: ['void*', 'void*'] };
const VERSION_3 = 0x20080522;

export const CAPABILITY = { SYS_ADMIN: 21, SYS_RESOURCE: 24 } as const;

/** Whether this thread has it in effect. */
export function hasEffective(capability: number): boolean {
  const [data, at] = [capabilities().data, capability < 32 ? 0 : 12];
  return (data.readUInt32LE(at) & (1 << (capability & 31))) !== 0;
}

/** Gives up an effective capability of this thread; others of the process keep it. One that it has not is no error. */
export function dropEffective(capability: number): void {
  const { header, data } = capabilities();
  const at = capability < 32 ? 0 : 12;
  data.writeUInt32LE((data.readUInt32LE(at) & ~(1 << (capability & 31))) >>> 0, at);
  syscall(CAPSET, [header, data], 'this thread');
}

/** All that this thread has, for `setEffective`. */
export function takeEffective(): Buffer {
  return capabilities().data;
}

/** What is in `taken` is in effect again, as far as it is permitted still. */
export function setEffective(taken: Buffer): void {
  const { header, data } = capabilities();
  for (const at of [0, 12]) taken.copy(data, at, at, at + 4);
  syscall(CAPSET, [header, data], 'this thread');
}

function capabilities(): { header: Buffer; data: Buffer } {
  const header = Buffer.alloc(8);
  header.writeUInt32LE(VERSION_3, 0);
  // Twice effective, permitted, inheritable: for the lower and the upper 32.
  const data = Buffer.alloc(24);
  syscall(CAPGET, [header, data], 'this thread');
  return { header, data };
}
