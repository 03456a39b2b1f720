/**
 * The device and its mount: opens /dev/fuse, mounts, and agrees with the kernel on how to speak. Nothing is served yet.
 *
 * The descriptor is the file system: whoever holds a copy may serve it, and when the last one is closed, it is dead for its users.
 */
import { closeSync, constants, openSync, readSync, writeSync } from 'node:fs';
import { mount } from '../mount.ts';
import { mountsAt } from '../mount-info.ts';
import {
  type Agreement,
  decodeHeader,
  decodeInit,
  emptyHeader,
  encodeInitReply,
  encodeReplyHeader,
  encodeResend,
  type InitFlags,
  type KernelOffer,
  OPCODE,
  REPLY_HEADER_BYTES,
  REQUEST_BUFFER_BYTES,
} from './fuse-protocol.ts';

export interface FuseConnection {
  /** Of /dev/fuse. The mount lives until the last copy of it is closed. */
  readonly fd: number;
  readonly agreed: Agreement;
  /** `major:minor` of the mount. The minor number is the connection's in /sys/fs/fuse/connections. */
  readonly device: string;
  readonly connection: number;
}

/** What a file system shows. */
export interface FuseShape {
  /** More flags for the answer to the kernel's first request. */
  initFlags(offer: KernelOffer): InitFlags;
  /** Flags of mount(2). */
  readonly mountFlags: number;
  /** The root is a file, and is mounted on one. */
  readonly file?: boolean;
  /** Largest write; one page by default: nobody writes. */
  readonly maxWriteBytes?: number;
  /** Reading the device never waits. */
  readonly nonBlocking?: boolean;
}

/** @throws what the system said */
export function connectFuse(mountPoint: string, source: string, shape: FuseShape): FuseConnection {
  const fd = openSync('/dev/fuse', constants.O_RDWR | (shape.nonBlocking ? constants.O_NONBLOCK : 0));
  try {
    const rootMode = shape.file ? '100000' : '40000';
    const options = `fd=${fd},rootmode=${rootMode},user_id=0,group_id=0,allow_other,default_permissions`;
    mount(source, mountPoint, 'fuse', shape.mountFlags, options);
  } catch (error) {
    closeSync(fd);
    throw error;
  }
  const agreed = agree(fd, shape);
  // Not by stat: nobody serves it yet.
  const device = mountsAt(mountPoint).at(-1)?.device ?? '0:0';
  return { fd, agreed, device, connection: Number(device.split(':')[1]) };
}

function agree(fd: number, shape: FuseShape): Agreement {
  const request = Buffer.alloc(REQUEST_BUFFER_BYTES);
  const lengthBytes = readSync(fd, request, 0, request.length, null);
  const header = emptyHeader();
  decodeHeader(request, header);
  const reply = Buffer.alloc(256);
  if (header.opcode !== OPCODE.INIT) throw new Error(`the kernel began with operation ${header.opcode}`);
  const offer = decodeInit(request, lengthBytes);
  const { bodyBytes, agreed } = encodeInitReply(reply, offer, shape.initFlags(offer), shape.maxWriteBytes);
  encodeReplyHeader(reply, bodyBytes, 0, header.uniqueLow, header.uniqueHigh);
  writeSync(fd, reply, 0, REPLY_HEADER_BYTES + bodyBytes);
  return agreed;
}

/** Has the kernel send again what a server that is gone had taken: after its end is known, before the next one reads. */
export function resend(fd: number): void {
  writeSync(fd, encodeResend());
}
