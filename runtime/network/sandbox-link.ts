/**
 * A sandbox's link: one end in its network namespace (eth0), the other on this machine, nothing in between, no bridge. Both ends are told each
 * other's hardware address for good, so nobody has to ask, and nobody is believed. Gone with the namespace, and so with the sandbox's last
 * process, whoever else has died: addresses, routes and the program at the link go with it.
 */
import { isIPv4 } from 'node:net';
import { inNetworkNamespace, makeTap, netlink } from '#linux';
import { addressBytes } from './address.ts';
import { LINK_PREFIX, type NetworkPool, type SandboxAddresses } from './address-pool.ts';

const { attribute, NetlinkSocket, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE } = netlink;
type Request = netlink.NetlinkRequest;

const RTM = {
  newLink: 16,
  deleteLink: 17,
  getLink: 18,
  newAddress: 20,
  deleteAddress: 21,
  newRoute: 24,
  newNeighbour: 28,
  newQdisc: 36,
  newFilter: 44,
} as const;
const AF_INET = 2;
const AF_INET6 = 10;
const EEXIST = 17;
const ENODEV = 19;
const EADDRNOTAVAIL = 99;
const IFF_UP = 1;

/** Of the end inside. */
const INSIDE_NAME = 'eth0';
const OUTER_MTU = 1500;

export interface MadeLink {
  /** On this machine. */
  readonly link: number;
  /** Names the sandbox's namespace for the kernel. */
  readonly cookie: bigint;
}

/**
 * Both ends, down, and what is known of this machine's end to the packet filter, before anything can pass.
 * @param owner Whose it is: other processes leave it alone.
 * @param guard Called with the number of the link before it is raised.
 * @throws SyscallError
 */
export async function makeSandboxLink(
  namespaceFd: number,
  mine: SandboxAddresses,
  pool: NetworkPool,
  owner: string,
  guard: (link: number) => number,
): Promise<MadeLink> {
  const outside = new NetlinkSocket();
  const inside = inNetworkNamespace(namespaceFd, () => new NetlinkSocket());
  try {
    await outside.sendInPool([createPair(namespaceFd, mine)]);
    const link = numberOf(mine.link);
    const program = guard(link);
    await outside.sendInPool([
      ...guardedBy(program, link),
      withoutLocalAddress(link),
      raise(link),
      ...waysTo(link, mine),
    ]);
    const peer = inNetworkNamespace(namespaceFd, () => numberOf(INSIDE_NAME));
    await inside.sendInPool([
      withoutLocalAddress(peer),
      ...ownAddresses(peer, mine),
      raise(peer),
      ...waysOut(peer, mine, pool),
    ]);
    // Last: what has an owner is whole.
    await outside.sendInPool([ownedBy(link, owner)]);
    return { link, cookie: inside.namespaceCookie() };
  } finally {
    outside.close();
    inside.close();
  }
}

/**
 * As `makeSandboxLink` for a virtual machine, which has the other end of a tap: `guestMessages` says what its kernel is told. It stays until it is removed; one
 * that is there is taken as it is, and guarded anew.
 * @throws SyscallError
 */
export async function makeSandboxTap(
  mine: SandboxAddresses,
  owner: string,
  guard: (link: number) => number,
): Promise<number> {
  const outside = new NetlinkSocket();
  try {
    // One that a machine has at its other end is not to be had again. A new one says whose it is before it stays: it is removed by that.
    if (sandboxLink(mine.link) === undefined) {
      makeTap(mine.link, () => outside.send([ownedBy(numberOf(mine.link), owner)]));
    }
    const link = numberOf(mine.link);
    const program = guard(link);
    await outside.sendInPool([
      hardwareAddress(link, mine.gatewayMac),
      ...guardedBy(program, link),
      withoutLocalAddress(link),
      raise(link),
      ...waysTo(link, mine),
    ]);
    await outside.sendInPool([ownedBy(link, owner)]);
    return link;
  } finally {
    outside.close();
  }
}

/** As a tap says whose it is: of which sandbox, of which node. */
export function tapOwner(runDir: string, id: string): string {
  return `${TAP_OF}${id} ${runDir}`;
}

export function isTapOf(runDir: string, owner: string): boolean {
  return owner.startsWith(TAP_OF) && owner.slice(owner.indexOf(' ', TAP_OF.length) + 1) === runDir;
}

const TAP_OF = 'dsec-tap ';

/** The one that it had with that number. One that has gone is no error, and one that another sandbox has by now stays. */
export function removeTapOf(number: number, id: string, runDir: string): void {
  const name = `${LINK_PREFIX}${number}`;
  const owner = tapOwner(runDir, id);
  const mine = linksNamed(name).find((found) => found.name === name && found.owner === owner);
  if (mine === undefined) return;
  const payload = linkMessage(mine.link, 0, []);
  withSocket((socket) => socket.send([{ what: name, type: RTM.deleteLink, payload, ignore: [ENODEV] }]));
}

/** Numbers of its links in a guest that has just come to life. */
const GUEST_LOOPBACK = 1;
const GUEST_LINK = 2;

/** For the kernel of a guest with one network device, in this order. */
export function guestMessages(mine?: SandboxAddresses, pool?: NetworkPool): Request[] {
  if (mine === undefined || pool === undefined) return [raise(GUEST_LOOPBACK)];
  return [
    raise(GUEST_LOOPBACK),
    withoutLocalAddress(GUEST_LINK),
    ...ownAddresses(GUEST_LINK, mine),
    raise(GUEST_LINK),
    ...waysOut(GUEST_LINK, mine, pool),
  ];
}

/** For the kernel of a guest that was on another network, as a fork's has been, with what it has open: the address before is no more. */
export function movedGuestMessages(before: SandboxAddresses, mine: SandboxAddresses, pool: NetworkPool): Request[] {
  const leave = [before.ipv4, before.ipv6].map((address) => ({
    ...addressOn(GUEST_LINK, address),
    type: RTM.deleteAddress,
    flags: 0,
    ignore: [EADDRNOTAVAIL],
  }));
  return [...leave, hardwareAddress(GUEST_LINK, mine.mac), ...guestMessages(mine, pool)];
}

function hardwareAddress(link: number, mac: Buffer): Request {
  const payload = linkMessage(link, 0, [attribute(IFLA.address, mac), attribute(IFLA.mtu, OUTER_MTU)]);
  return { what: `link ${link}`, type: RTM.newLink, payload };
}

/** The program of a link that is there, in place of the one before. */
export function guardLink(link: number, program: number): void {
  withSocket((socket) => socket.send(guardedBy(program, link)));
}

export function removeSandboxLink(name: string): void {
  withSocket((socket) => socket.send([removeLink(name)]));
}

/** Undefined: there is none. */
export function sandboxLink(name: string): number | undefined {
  return netlink.linkNumber(name);
}

export function namespaceCookie(namespaceFd: number): bigint {
  const socket = inNetworkNamespace(namespaceFd, () => new NetlinkSocket());
  try {
    return socket.namespaceCookie();
  } finally {
    socket.close();
  }
}

export interface FoundLink {
  readonly name: string;
  readonly link: number;
  readonly owner: string;
}

/** Those whose names begin with `prefix`. */
export function linksNamed(prefix: string): FoundLink[] {
  const text = (bytes: Buffer | undefined) => bytes?.toString().replace(/\0.*/s, '') ?? '';
  return withSocket((socket) =>
    socket
      .dump('links', RTM.getLink, Buffer.alloc(16))
      .map((payload) => {
        const found = netlink.attributesOf(payload, 16);
        return { name: text(found.get(IFLA.name)), link: payload.readInt32LE(4), owner: text(found.get(IFLA.alias)) };
      })
      .filter(({ name }) => name.startsWith(prefix)),
  );
}

/** The resolver's addresses, on this machine's loopback: they are there without any sandbox, and no other machine sees them. */
export function addGatewayAddresses(pool: NetworkPool): void {
  const lo = numberOf('lo');
  withSocket((socket) => socket.send([raise(lo), ...gatewayAddresses(RTM.newAddress, lo, pool)]));
}

export function removeGatewayAddresses(pool: NetworkPool): void {
  withSocket((socket) => socket.send(gatewayAddresses(RTM.deleteAddress, numberOf('lo'), pool)));
}

function gatewayAddresses(type: number, lo: number, pool: NetworkPool): Request[] {
  return [pool.gateway4, pool.gateway6].map((address) => ({
    ...addressOn(lo, address),
    type,
    ignore: [EEXIST, EADDRNOTAVAIL],
  }));
}

function withSocket<T>(work: (socket: netlink.NetlinkSocket) => T): T {
  const socket = new NetlinkSocket();
  try {
    return work(socket);
  } finally {
    socket.close();
  }
}

function numberOf(name: string): number {
  const number = netlink.linkNumber(name);
  if (number === undefined) throw new Error(`link ${name} has gone`);
  return number;
}

function linkMessage(link: number, change: number, attributes: readonly Buffer[]): Buffer {
  const head = Buffer.alloc(16);
  head.writeInt32LE(link, 4);
  head.writeUInt32LE(change, 8);
  head.writeUInt32LE(change, 12);
  return Buffer.concat([head, ...attributes]);
}

const IFLA = { address: 1, name: 3, mtu: 4, linkInfo: 18, alias: 20, afSpec: 26, namespaceFd: 28 } as const;

function createPair(namespaceFd: number, { link, mac, gatewayMac }: SandboxAddresses): Request {
  const KIND = 1;
  const DATA = 2;
  const PEER = 1;
  const peer = linkMessage(0, 0, [
    attribute(IFLA.name, INSIDE_NAME),
    attribute(IFLA.address, mac),
    attribute(IFLA.mtu, OUTER_MTU),
    attribute(IFLA.namespaceFd, namespaceFd),
  ]);
  const payload = linkMessage(0, 0, [
    attribute(IFLA.name, link),
    attribute(IFLA.address, gatewayMac),
    attribute(IFLA.mtu, OUTER_MTU),
    attribute(IFLA.linkInfo, [attribute(KIND, 'veth'), attribute(DATA, [attribute(PEER, peer)])]),
  ]);
  return { what: link, type: RTM.newLink, flags: NLM_F_CREATE | NLM_F_EXCL, payload };
}

function removeLink(name: string): Request {
  return {
    what: name,
    type: RTM.deleteLink,
    payload: linkMessage(0, 0, [attribute(IFLA.name, name)]),
    ignore: [ENODEV],
  };
}

/** No link-local IPv6 address: with it the kernel would look for routers and neighbours. */
function withoutLocalAddress(link: number): Request {
  const ADDRESS_GENERATION = 8;
  const NONE = Buffer.from([1]);
  const spec = attribute(IFLA.afSpec, [attribute(AF_INET6, [attribute(ADDRESS_GENERATION, NONE)])]);
  // Where IPv6 is switched off there is nothing to set.
  return { what: `link ${link}`, type: RTM.newLink, payload: linkMessage(link, 0, [spec]), ignore: [97, 22] };
}

function ownedBy(link: number, owner: string): Request {
  const payload = linkMessage(link, 0, [attribute(IFLA.alias, Buffer.from(owner.slice(-255)))]);
  return { what: `link ${link}`, type: RTM.newLink, payload };
}

function raise(link: number): Request {
  return { what: `link ${link}`, type: RTM.newLink, payload: linkMessage(link, IFF_UP, []) };
}

/** clsact, and the program at its entrance. */
function guardedBy(program: number, link: number): Request[] {
  const CLSACT = 0xfffffff1;
  const ENTRANCE = 0xfffffff2;
  const EVERY_PROTOCOL = 0x0300;
  const PRIORITY = 1;
  const [KIND, OPTIONS] = [1, 2];
  const BPF = { fd: 6, name: 7, flags: 8 };
  const DIRECT_ACTION = 1;
  const head = (handle: number, parent: number, info: number) => {
    const bytes = Buffer.alloc(20);
    bytes.writeInt32LE(link, 4);
    bytes.writeUInt32LE(handle, 8);
    bytes.writeUInt32LE(parent, 12);
    bytes.writeUInt32LE(info >>> 0, 16);
    return bytes;
  };
  const options = [attribute(BPF.fd, program), attribute(BPF.name, 'dsec_egress'), attribute(BPF.flags, DIRECT_ACTION)];
  return [
    {
      what: `clsact of link ${link}`,
      type: RTM.newQdisc,
      flags: NLM_F_CREATE | NLM_F_EXCL,
      payload: Buffer.concat([head(0xffff0000, CLSACT, 0), attribute(KIND, 'clsact')]),
      ignore: [EEXIST],
    },
    {
      what: `program of link ${link}`,
      type: RTM.newFilter,
      flags: NLM_F_CREATE | NLM_F_REPLACE,
      payload: Buffer.concat([
        head(1, ENTRANCE, (PRIORITY << 16) | EVERY_PROTOCOL),
        attribute(KIND, 'bpf'),
        attribute(OPTIONS, options),
      ]),
    },
  ];
}

function rawAddress(address: string): Buffer {
  const bytes = addressBytes(address)!;
  return isIPv4(address) ? bytes.subarray(12) : bytes;
}

function addressOn(link: number, address: string): Request {
  const bytes = rawAddress(address);
  const family = bytes.length === 4 ? AF_INET : AF_INET6;
  const NO_DUPLICATE_DETECTION = 0x02;
  const [ADDRESS, LOCAL] = [1, 2];
  const head = Buffer.from([family, bytes.length * 8, family === AF_INET6 ? NO_DUPLICATE_DETECTION : 0, 0, 0, 0, 0, 0]);
  head.writeInt32LE(link, 4);
  const payload = Buffer.concat([head, attribute(LOCAL, bytes), attribute(ADDRESS, bytes)]);
  return { what: address, type: RTM.newAddress, flags: NLM_F_CREATE | NLM_F_REPLACE, payload };
}

/** @param destination Undefined: everywhere. @param via Undefined: it is at the other end itself. */
function route(link: number, destination: string | undefined, via: string | undefined, isIPv6: boolean): Request {
  const MAIN = 254;
  const BOOT = 3;
  const UNICAST = 1;
  const ONLINK = 4;
  const [DESTINATION, LINK, GATEWAY] = [1, 4, 5];
  const bytes = destination === undefined ? undefined : rawAddress(destination);
  const scope = via === undefined && !isIPv6 ? 253 : 0;
  const head = Buffer.from([
    isIPv6 ? AF_INET6 : AF_INET,
    (bytes?.length ?? 0) * 8,
    0,
    0,
    MAIN,
    BOOT,
    scope,
    UNICAST,
    0,
    0,
    0,
    0,
  ]);
  head.writeUInt32LE(via === undefined ? 0 : ONLINK, 8);
  const payload = Buffer.concat([
    head,
    attribute(LINK, link),
    ...(bytes === undefined ? [] : [attribute(DESTINATION, bytes)]),
    ...(via === undefined ? [] : [attribute(GATEWAY, rawAddress(via))]),
  ]);
  return {
    what: `route to ${destination ?? 'everywhere'}`,
    type: RTM.newRoute,
    flags: NLM_F_CREATE | NLM_F_REPLACE,
    payload,
  };
}

function neighbour(link: number, address: string, mac: Buffer): Request {
  const PERMANENT = 0x80;
  const [DESTINATION, HARDWARE] = [1, 2];
  const bytes = rawAddress(address);
  const head = Buffer.alloc(12);
  head[0] = bytes.length === 4 ? AF_INET : AF_INET6;
  head.writeInt32LE(link, 4);
  head.writeUInt16LE(PERMANENT, 8);
  const payload = Buffer.concat([head, attribute(DESTINATION, bytes), attribute(HARDWARE, mac)]);
  return { what: `neighbour ${address}`, type: RTM.newNeighbour, flags: NLM_F_CREATE | NLM_F_REPLACE, payload };
}

function waysTo(link: number, { ipv4, ipv6, mac }: SandboxAddresses): Request[] {
  return [
    neighbour(link, ipv4, mac),
    neighbour(link, ipv6, mac),
    route(link, ipv4, undefined, false),
    route(link, ipv6, undefined, true),
  ];
}

function ownAddresses(peer: number, { ipv4, ipv6 }: SandboxAddresses): Request[] {
  return [addressOn(peer, ipv4), addressOn(peer, ipv6)];
}

function waysOut(peer: number, { gatewayMac }: SandboxAddresses, { gateway4, gateway6 }: NetworkPool): Request[] {
  return [
    neighbour(peer, gateway4, gatewayMac),
    neighbour(peer, gateway6, gatewayMac),
    route(peer, undefined, gateway4, false),
    route(peer, undefined, gateway6, true),
  ];
}
