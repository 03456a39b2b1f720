/** Who is at the other end of a unix socket, by the kernel's word (SO_PEERCRED). */
import type { Socket } from 'node:net';
import { type Call, call } from './libc.ts';

const GETSOCKOPT: Call = { name: 'getsockopt', result: 'int', args: ['int', 'int', 'int', 'void*', 'void*'] };
const SOL_SOCKET = 1;
const SO_PEERCRED = 17;

export interface Peer {
  readonly pid: number;
  readonly uid: number;
  readonly gid: number;
}

/** Undefined when the socket is closed. @throws ENOTSOCK and the like */
export function peerOf(socket: Socket): Peer | undefined {
  // Node has no public way to a socket's descriptor.
  const fd = (socket as unknown as { _handle?: { fd?: number } | null })._handle?.fd;
  if (fd === undefined || fd < 0) return undefined;
  const credentials = Buffer.alloc(12);
  const length = Buffer.alloc(4);
  length.writeUInt32LE(credentials.length);
  call(GETSOCKOPT, [fd, SOL_SOCKET, SO_PEERCRED, credentials, length]);
  return {
    pid: credentials.readInt32LE(0),
    uid: credentials.readUInt32LE(4),
    gid: credentials.readUInt32LE(8),
  };
}
