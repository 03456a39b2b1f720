/**
 * What a guest with an operating system of its own asks its link before it has an address: who has the gateway's (ARP), and what its own is (DHCP). The
 * program at the link answers in the kernel, so that a guest comes up, and stays up, whatever services are being restarted. Nobody believes the guest: whatever
 * it asks for, it is told what its sandbox has. Containers and microVMs are told by us, and get no answer here (`mask4` of their state is 0).
 *
 * DHCP: an offer to each discover, an acknowledgement to each request, for ever (RFC 2131); the message type has to be the first option, as all clients
 * have it. Anything else of it is dropped quietly. IPv4 alone.
 */
import { type BpfAssembler, FRAME, HELPER, reg } from './bpf-assembler.ts';

/** Of the program around it (egress-program.ts): its registers, its part of the stack, its labels. */
export interface AnswerPlaces {
  readonly packet: number;
  readonly state: number;
  /** Forty bytes of the stack that may be written. */
  readonly header: number;
  /** Where an Ethernet header of an answer begins, with room for 74 bytes. */
  readonly answer: number;
  /** Offsets in the state. */
  readonly own4: number;
  readonly gateway4: number;
  readonly mask4: number;
  readonly number: number;
  /** Emits: the bytes of the packet from `from` to the stack. */
  load(from: number, to: number, bytes: number): void;
  /** Emits: the packet goes back where it came from. */
  redirect(): void;
}

const ETHERNET = 14;
const BOOTP = 42;
const OPTIONS = BOOTP + 240;
/** As long as the shortest message of BOOTP: some clients take no less. */
const ANSWER_BYTES = OPTIONS + 60;
const OPTIONS_AT = -304;
const SMALL_AT = -240;
const REPLY_TYPE = -208;

/** Who has the gateway's address? */
export function answerArp(a: BpfAssembler, at: AnswerPlaces): void {
  const { header, answer, state } = at;
  a.label('arp').load(4, 1, state, at.mask4).jumpIf('eq', 1, 0, 'quiet');
  at.load(ETHERNET, header, 28);
  // Ethernet, IPv4, a request.
  a.load(4, 1, FRAME, header).jumpIf('ne', 1, 0x00080100, 'quiet');
  a.load(4, 1, FRAME, header + 4).jumpIf('ne', 1, 0x01000406, 'quiet');
  a.load(4, 1, FRAME, header + 24)
    .load(4, 2, state, at.gateway4 + 12)
    .jumpIf('ne', 1, reg(2), 'quiet');
  copy(a, header + 8, answer, 6);
  gatewayMac(a, at, answer + 6);
  a.store(2, FRAME, answer + 12, 0x0608)
    .store(4, FRAME, answer + 14, 0x00080100)
    .store(4, FRAME, answer + 18, 0x02000406);
  gatewayMac(a, at, answer + 22);
  copy(a, header + 24, answer + 28, 4);
  copy(a, header + 8, answer + 32, 6);
  copy(a, header + 14, answer + 38, 4);
  resize(a, at, 42);
  store(a, at, 0, answer, 42);
  at.redirect();
}

/** Falls through with what is no DHCP. The IP header is at `header`. */
export function takeDhcp(a: BpfAssembler, at: AnswerPlaces): void {
  const { header, state } = at;
  const UDP = 17;
  a.load(1, 1, FRAME, header + 9).jumpIf('ne', 1, UDP, 'no dhcp');
  a.load(4, 1, state, at.mask4).jumpIf('eq', 1, 0, 'no dhcp');
  a.load(4, 1, FRAME, header + 16)
    .load(4, 2, state, at.gateway4 + 12)
    .jumpIf('eq', 1, reg(2), 'to us');
  a.load(2, 1, FRAME, header + 16).jumpIf('ne', 1, 0xffff, 'no dhcp');
  a.load(2, 1, FRAME, header + 18).jumpIf('ne', 1, 0xffff, 'no dhcp');
  a.label('to us');
  at.load(34, header + 20, 4);
  // Port 67.
  a.load(2, 1, FRAME, header + 22).jumpIf('eq', 1, 0x4300, 'dhcp');
  a.label('no dhcp');
}

export function answerDhcp(a: BpfAssembler, at: AnswerPlaces): void {
  const { header, answer, state } = at;
  a.label('dhcp');
  at.load(BOOTP, header, 4);
  // A question, of Ethernet.
  a.load(4, 1, FRAME, header).do('and', 1, 0xffffff).jumpIf('ne', 1, 0x060101, 'quiet');
  at.load(OPTIONS - 4, header, 8);
  a.load(4, 1, FRAME, header).jumpIf('ne', 1, 0x63538263, 'quiet');
  a.load(2, 1, FRAME, header + 4).jumpIf('ne', 1, 0x0135, 'quiet');
  a.load(1, 1, FRAME, header + 6)
    .move(2, 2)
    .jumpIf('eq', 1, 1, 'dhcp type');
  a.move(2, 5).jumpIf('ne', 1, 3, 'quiet');
  a.label('dhcp type').store(1, FRAME, REPLY_TYPE, reg(2));
  resize(a, at, ANSWER_BYTES);
  // To everybody at this end.
  for (let byte = 0; byte < 6; byte += 2) a.store(2, FRAME, answer + byte, 0xffff);
  gatewayMac(a, at, answer + 6);
  a.store(2, FRAME, answer + 12, 0x0008);
  a.store(4, FRAME, answer + 14, bigEndian(0x45000000 + ANSWER_BYTES - ETHERNET));
  a.store(4, FRAME, answer + 18, 0x00400000).store(4, FRAME, answer + 22, 0x00001140);
  a.load(4, 1, state, at.gateway4 + 12)
    .store(4, FRAME, answer + 26, reg(1))
    .store(4, FRAME, answer + 30, -1);
  a.move(1, 0)
    .move(2, 0)
    .stack(3, answer + 14)
    .move(4, 20)
    .move(5, 0)
    .call(HELPER.checksumDifference);
  for (let fold = 0; fold < 2; fold++) a.move(1, reg(0)).do('rsh', 1, 16).do('and', 0, 0xffff).do('add', 0, reg(1));
  a.do('xor', 0, 0xffff).store(2, FRAME, answer + 24, reg(0));
  // UDP without a checksum.
  a.store(4, FRAME, answer + 34, bigEndian((67 << 16) + 68));
  a.store(4, FRAME, answer + 38, bigEndian((ANSWER_BYTES - 34) << 16));
  store(a, at, 0, answer, 42);
  a.store(4, FRAME, SMALL_AT, 0x00060102);
  store(a, at, BOOTP, SMALL_AT, 4);
  a.load(4, 1, state, at.own4 + 12).store(4, FRAME, SMALL_AT, reg(1));
  a.load(4, 1, state, at.gateway4 + 12).store(4, FRAME, SMALL_AT + 4, reg(1));
  store(a, at, BOOTP + 16, SMALL_AT, 8);
  options(a, at);
  store(a, at, OPTIONS, OPTIONS_AT, ANSWER_BYTES - OPTIONS);
  at.redirect();
}

/** Each at a multiple of four, with what stands for nothing between. */
function options(a: BpfAssembler, { state, gateway4, mask4 }: AnswerPlaces): void {
  const FOREVER = -1;
  for (let byte = 0; byte < ANSWER_BYTES - OPTIONS; byte += 4) a.store(4, FRAME, OPTIONS_AT + byte, 0);
  a.store(2, FRAME, OPTIONS_AT, 0x0135)
    .load(1, 1, FRAME, REPLY_TYPE)
    .store(1, FRAME, OPTIONS_AT + 2, reg(1));
  const address = (place: number, option: number) => a.store(2, FRAME, OPTIONS_AT + place - 2, 0x0400 | option);
  a.load(4, 1, state, gateway4 + 12);
  // Its server, its router, its resolver.
  for (const [place, option] of [
    [8, 54],
    [32, 3],
    [40, 6],
  ] as const) {
    address(place, option).store(4, FRAME, OPTIONS_AT + place, reg(1));
  }
  address(16, 51).store(4, FRAME, OPTIONS_AT + 16, FOREVER);
  address(24, 1)
    .load(4, 1, state, mask4)
    .store(4, FRAME, OPTIONS_AT + 24, reg(1));
  // MTU 1500, the end.
  a.store(4, FRAME, OPTIONS_AT + 44, bigEndian(0x1a0205dc)).store(4, FRAME, OPTIONS_AT + 48, 0xff);
}

function gatewayMac(a: BpfAssembler, { state, number }: AnswerPlaces, to: number): void {
  // As `sandboxAddresses` makes it (address-pool.ts).
  a.store(2, FRAME, to, 0xd506).store(2, FRAME, to + 2, 0x00ec);
  a.load(4, 1, state, number)
    .swap(16, 1)
    .store(2, FRAME, to + 4, reg(1));
}

function copy(a: BpfAssembler, from: number, to: number, bytes: number): void {
  for (let at = 0; at < bytes; at += 2) a.load(2, 1, FRAME, from + at).store(2, FRAME, to + at, reg(1));
}

function resize(a: BpfAssembler, { packet }: AnswerPlaces, bytes: number): void {
  a.move(1, reg(packet)).move(2, bytes).move(3, 0).call(HELPER.changeTail).jumpIf('ne', 0, 0, 'dropped');
}

function store(a: BpfAssembler, { packet }: AnswerPlaces, to: number, from: number, bytes: number): void {
  a.move(1, reg(packet)).move(2, to).stack(3, from).move(4, bytes).move(5, 0).call(HELPER.storeBytes);
  a.jumpIf('ne', 0, 0, 'dropped');
}

/** As it is written, in this machine's order. */
function bigEndian(value: number): number {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32BE(value >>> 0, 0);
  return bytes.readInt32LE(0);
}
