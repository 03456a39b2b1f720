/** A tap: a link of this machine whose other end is a process, here a virtual machine. It stays without one, until it is removed like any link. */
import { closeSync, constants, openSync } from 'node:fs';
import { type Call, call } from './libc.ts';

const IOCTL_ARG: Call = { name: 'ioctl', result: 'int', args: ['int', 'ulong', 'ulong'] };
const IOCTL_POINTER: Call = { name: 'ioctl', result: 'int', args: ['int', 'ulong', 'void*'] };
const TUN = '/dev/net/tun';
const TUNSETIFF = 0x400454ca;
const TUNSETPERSIST = 0x400454cb;
const TUNSETOWNER = 0x400454cc;
const IFF_TAP = 0x0002;
const IFF_NO_PI = 0x1000;
/** Large packets go through as they are. */
const IFF_VNET_HDR = 0x4000;
const NAME_BYTES = 16;

/** For this user alone: without an owner anybody who may open /dev/net/tun could be its other end. One that is there is left as it is. Until `beforeItStays` has returned it goes with this process. @throws SyscallError, where there is no /dev/net/tun too */
export function makeTap(name: string, beforeItStays: () => void = () => {}): void {
  const fd = openSync(TUN, constants.O_RDWR);
  try {
    takeEnd(fd, name);
    call(IOCTL_ARG, [fd, TUNSETOWNER, process.geteuid!()], name);
    beforeItStays();
    call(IOCTL_ARG, [fd, TUNSETPERSIST, 1], name);
  } finally {
    closeSync(fd);
  }
}

/** One that nobody has the other end of: from now on that may be a process of `user`. @throws SyscallError */
export function giveTap(name: string, user: number): void {
  const fd = openSync(TUN, constants.O_RDWR);
  try {
    takeEnd(fd, name);
    call(IOCTL_ARG, [fd, TUNSETOWNER, user], name);
  } finally {
    closeSync(fd);
  }
}

function takeEnd(fd: number, name: string): void {
  const request = Buffer.alloc(40);
  request.write(name, 0, NAME_BYTES - 1, 'latin1');
  request.writeUInt16LE(IFF_TAP | IFF_NO_PI | IFF_VNET_HDR, NAME_BYTES);
  call(IOCTL_POINTER, [fd, TUNSETIFF, request], name);
}
