/**
 * The program in the kernel that sees every packet of a sandbox as it arrives at this machine's end of its link (tc, direct action). One for
 * all links: the link's number leads to the sandbox's state, that to its table of rules. Root inside has no way to it.
 *
 * It passes what comes from the sandbox's own addresses, to the resolver's port, or to what a rule allows, and drops the rest: VLANs, other
 * protocols than IP (ARP and neighbour discovery too: both ends know each other's hardware address), IP options, fragments, extension
 * headers. A link that it does not know passes nothing. What is dropped is told through a ring buffer, each sandbox at its own rate; a new
 * TCP connection that is refused is answered with a reset, so that the program inside learns of it at once.
 *
 * Addresses of answered names hold for new connections until they expire. Other packets to an expired one pass with a mark, and the packet
 * filter (host-filter.ts) drops those that belong to no connection that it knows.
 */
import { BpfAssembler, FRAME, HELPER, reg } from './bpf-assembler.ts';
import { type AnswerPlaces, answerArp, answerDhcp, takeDhcp } from './guest-answers.ts';
import { ANY_PROTOCOL, ENTRY_BYTES, FLAG_DENIES, MAX_ENTRIES } from './rule-table.ts';

/** What is on record of a link in the kernel. Addresses are sixteen bytes; the two of the gateway are the resolver's. */
export const STATE = {
  own4: 0,
  own6: 16,
  gateway4: 32,
  gateway6: 48,
  number: 64,
  passed: 72,
  passedBytes: 80,
  denied: 88,
  deniedBytes: 96,
  /** Denied and not told, because there were too many. */
  untold: 104,
  /** When the next one may be told (GCRA). */
  toldUntil: 112,
  /** When the resolver may be asked next (GCRA). */
  askedUntil: 120,
  /** Of its network, for a guest that has to ask for its address; 0: nobody asks here, and nobody is answered. */
  mask4: 128,
  sizeBytes: 136,
} as const;

/** What is told of a denied packet. `prefix` and `destination` are the key of the tables too. */
export const EVENT = {
  time: 0,
  source: 8,
  link: 24,
  prefix: 28,
  destination: 32,
  sourcePort: 48,
  port: 50,
  protocol: 52,
  reason: 53,
  etherType: 54,
  packetBytes: 56,
  sandbox: 60,
  sizeBytes: 64,
} as const;

export const REASONS = [
  'quiet',
  'no rule',
  'denied',
  'closed',
  'this machine',
  'no policy',
  'spoofed source',
  'fragment',
  'ip options',
  'extension header',
  'not ip',
  'too short',
  'too many questions',
] as const;
export type Reason = (typeof REASONS)[number];

/** "dsec": of packets that only a known connection may have. */
export const MARK_KNOWN_ONLY = 0x64736563;

export interface ProgramMaps {
  /** Number of the link -> STATE. */
  readonly links: number;
  /** Number of the sandbox -> its table of rules. */
  readonly policies: number;
  /** Ranges that no rule opens. */
  readonly closed: number;
  readonly ring: number;
}

const TC_PASS = 0;
const TC_DROP = 2;
const TELL_EACH_NS = 2_000_000;
const TELL_BURST_NS = 200_000_000;
/** Packets to the resolver: more than it answers (resolver/sandbox-answers.ts), so that whoever floods it takes no time of the service's. */
const ASK_EACH_NS = 1_000_000;
const ASK_BURST_NS = 2_000_000_000;

/** Offsets in struct __sk_buff. */
const SKB = { length: 0, mark: 8, protocol: 16, vlan: 20, link: 40 } as const;

// The stack, from the frame pointer down: the event, a header, the arguments of a route look-up or the frame of a reset, two variables.
const AT = (field: keyof typeof EVENT) => EVENT[field] - EVENT.sizeBytes;
const HEADER = -EVENT.sizeBytes - 40;
const ROUTE = HEADER - 64;
/** Where the frame's Ethernet header begins; what follows it is aligned as the stack wants it. */
const RESET = -186;
const KNOWN_ONLY = -200;
const BARE_SYN = -196;

const IPV4 = 0x0800;
const IPV6 = 0x86dd;
const TCP = 6;
const UDP = 17;
const DNS_PORT = 53;

/** Registers that hold over calls: the packet, the sandbox's state, where the transport header begins. */
const PACKET = 6;
const STATE_OF = 7;
const TRANSPORT = 8;

export function egressProgram(maps: ProgramMaps): Buffer {
  const a = new BpfAssembler();
  begin(a, maps);
  internet4(a);
  internet6(a);
  transport(a);
  closedRanges(a, maps);
  rules(a, maps);
  notThisMachine(a);
  verdicts(a, maps);
  answerArp(a, ANSWERS(a));
  answerDhcp(a, ANSWERS(a));
  return a.build();
}

/** Bytes of the packet to the stack. @param from A register or an offset. */
function loadPacket(a: BpfAssembler, from: number | 'transport', to: number, bytes: number, more = 0): void {
  a.move(1, reg(PACKET));
  if (from === 'transport') a.move(2, reg(TRANSPORT)).do('add', 2, more);
  else a.move(2, from);
  a.stack(3, to).move(4, bytes).call(HELPER.loadBytes).jumpIf('ne', 0, 0, 'too short');
}

function copy(a: BpfAssembler, from: number, to: number, bytes: number): void {
  for (let at = 0; at < bytes; at += 4) a.load(4, 1, FRAME, from + at).store(4, FRAME, to + at, reg(1));
}

/** To `label` when sixteen bytes of the stack are those of the state. */
function jumpIfSame(a: BpfAssembler, stackAt: number, stateAt: number, label: string): void {
  const no = a.fresh();
  a.load(8, 1, FRAME, stackAt).load(8, 2, STATE_OF, stateAt).jumpIf('ne', 1, reg(2), no);
  a.load(8, 1, FRAME, stackAt + 8)
    .load(8, 2, STATE_OF, stateAt + 8)
    .jumpIf('eq', 1, reg(2), label);
  a.label(no);
}

function begin(a: BpfAssembler, maps: ProgramMaps): void {
  a.move(PACKET, reg(1));
  for (let at = KNOWN_ONLY; at < 0; at += 8) a.store(8, FRAME, at, 0);
  a.store(4, FRAME, AT('prefix'), 128);
  a.load(4, 1, PACKET, SKB.link).store(4, FRAME, AT('link'), reg(1));
  a.load(4, 1, PACKET, SKB.length).store(4, FRAME, AT('packetBytes'), reg(1));
  a.map(1, maps.links).stack(2, AT('link')).call(HELPER.lookUp).jumpIf('ne', 0, 0, 'known');
  a.return(TC_DROP);
  a.label('known').move(STATE_OF, reg(0));
  a.load(4, 1, STATE_OF, STATE.number).store(4, FRAME, AT('sandbox'), reg(1));
  a.load(4, 1, PACKET, SKB.protocol).swap(16, 1).store(2, FRAME, AT('etherType'), reg(1));
  a.load(4, 2, PACKET, SKB.vlan).jumpIf('ne', 2, 0, 'not ip');
  // Where we have told it our hardware address, who asks for that has changed it; it is no attempt at anything.
  a.jumpIf('eq', 1, IPV4, 'ipv4').jumpIf('eq', 1, IPV6, 'ipv6').jumpIf('eq', 1, 0x0806, 'arp').jump('not ip');
}

function internet4(a: BpfAssembler): void {
  a.label('ipv4');
  loadPacket(a, 14, HEADER, 20);
  copy(a, HEADER + 12, AT('source') + 12, 4);
  copy(a, HEADER + 16, AT('destination') + 12, 4);
  // ::ffff:a.b.c.d
  a.store(4, FRAME, AT('source') + 8, 0xffff0000).store(4, FRAME, AT('destination') + 8, 0xffff0000);
  a.load(1, 1, FRAME, HEADER + 9).store(1, FRAME, AT('protocol'), reg(1));
  a.load(1, 1, FRAME, HEADER).jumpIf('ne', 1, 0x45, 'ip options');
  a.load(2, 1, FRAME, HEADER + 6)
    .swap(16, 1)
    .jumpIf('set', 1, 0x3fff, 'fragment');
  takeDhcp(a, ANSWERS(a));
  jumpIfSame(a, AT('source'), STATE.own4, 'own ipv4');
  a.jump('spoofed source').label('own ipv4').move(TRANSPORT, 34).jump('transport');
}

const EXTENSION_HEADERS = [0, 43, 44, 51, 60, 135, 139, 140];
const ICMP6 = 58;

function internet6(a: BpfAssembler): void {
  a.label('ipv6');
  loadPacket(a, 14, HEADER, 40);
  copy(a, HEADER + 8, AT('source'), 16);
  copy(a, HEADER + 24, AT('destination'), 16);
  a.load(1, 1, FRAME, HEADER + 6).store(1, FRAME, AT('protocol'), reg(1));
  // Groups that its kernel joins by itself (with a hop-by-hop header), and other talk with neighbours.
  a.load(1, 2, FRAME, AT('destination')).jumpIf('ne', 1, 0, 'no options').jumpIf('eq', 2, 0xff, 'quiet');
  a.label('no options');
  for (const header of EXTENSION_HEADERS) a.jumpIf('eq', 1, header, 'extension header');
  a.jumpIf('ne', 1, ICMP6, 'unicast');
  loadPacket(a, 54, HEADER, 4);
  a.load(1, 1, FRAME, HEADER)
    .jumpIf('eq', 1, 143, 'quiet')
    .jumpIf('lt', 1, 130, 'unicast')
    .jumpIf('le', 1, 137, 'quiet');
  a.label('unicast');
  // An IPv4 address in an IPv6 packet would be looked up as what it is not.
  a.load(8, 1, FRAME, AT('destination')).jumpIf('ne', 1, 0, 'real ipv6');
  a.load(4, 1, FRAME, AT('destination') + 8).jumpIf('eq', 1, 0, 'closed');
  a.do('rsh', 1, 16).jumpIf('eq', 1, 0xffff, 'closed');
  a.label('real ipv6');
  jumpIfSame(a, AT('source'), STATE.own6, 'own ipv6');
  a.jump('spoofed source').label('own ipv6').move(TRANSPORT, 54);
}

/** Ports; of ICMP the type; of others 0. */
function transport(a: BpfAssembler): void {
  a.label('transport').load(1, 1, FRAME, AT('protocol'));
  a.jumpIf('eq', 1, TCP, 'tcp').jumpIf('eq', 1, UDP, 'ports').jumpIf('eq', 1, 1, 'icmp').jumpIf('eq', 1, ICMP6, 'icmp');
  a.jump('destination');
  a.label('icmp');
  loadPacket(a, 'transport', HEADER, 4);
  a.load(1, 1, FRAME, HEADER).store(2, FRAME, AT('port'), reg(1)).jump('destination');
  a.label('tcp');
  loadPacket(a, 'transport', HEADER, 4, 12);
  a.load(1, 1, FRAME, HEADER + 1)
    .do('and', 1, 0x12)
    .jumpIf('ne', 1, 0x02, 'ports')
    .store(4, FRAME, BARE_SYN, 1);
  a.label('ports');
  loadPacket(a, 'transport', HEADER, 4);
  a.load(2, 1, FRAME, HEADER).swap(16, 1).store(2, FRAME, AT('sourcePort'), reg(1));
  a.load(2, 1, FRAME, HEADER + 2)
    .swap(16, 1)
    .store(2, FRAME, AT('port'), reg(1));
  // The resolver, and nothing else of this machine.
  a.jumpIf('ne', 1, DNS_PORT, 'destination');
  jumpIfSame(a, AT('destination'), STATE.gateway4, 'question');
  jumpIfSame(a, AT('destination'), STATE.gateway6, 'question');
  a.label('destination');
}

function closedRanges(a: BpfAssembler, maps: ProgramMaps): void {
  a.map(1, maps.closed).stack(2, AT('prefix')).call(HELPER.lookUp).jumpIf('ne', 0, 0, 'closed');
}

/** Falls through with what a rule allows. */
function rules(a: BpfAssembler, maps: ProgramMaps): void {
  const ENTRY = 9;
  a.map(1, maps.policies).stack(2, AT('sandbox')).call(HELPER.lookUp).jumpIf('eq', 0, 0, 'no policy');
  a.move(1, reg(0)).stack(2, AT('prefix')).call(HELPER.lookUp).jumpIf('eq', 0, 0, 'no rule').move(ENTRY, reg(0));
  for (let index = 0; index < MAX_ENTRIES; index++) {
    const at = index * ENTRY_BYTES;
    const next = index + 1 < MAX_ENTRIES ? `entry ${index + 1}` : 'no entry';
    const fits = `fits ${index}`;
    a.label(`entry ${index}`)
      .load(1, 1, ENTRY, at + 4)
      .jumpIf('eq', 1, 0, 'no entry');
    a.load(1, 2, FRAME, AT('protocol')).jumpIf('eq', 1, ANY_PROTOCOL, fits).jumpIf('ne', 1, reg(2), next);
    a.label(fits).load(2, 2, FRAME, AT('port'));
    a.load(2, 1, ENTRY, at).jumpIf('lt', 2, reg(1), next);
    a.load(2, 1, ENTRY, at + 2).jumpIf('gt', 2, reg(1), next);
    a.load(1, 1, ENTRY, at + 5).jumpIf('set', 1, FLAG_DENIES, 'denied');
    a.load(8, TRANSPORT, ENTRY, at + 8).jumpIf('eq', TRANSPORT, 0, 'allowed');
    a.call(HELPER.now).jumpIf('gt', TRANSPORT, reg(0), 'allowed');
    // Expired: a new connection is none of it.
    a.load(4, 1, FRAME, BARE_SYN).jumpIf('ne', 1, 0, next).store(4, FRAME, KNOWN_ONLY, 1).jump(next);
  }
  a.label('no entry').load(4, 1, FRAME, KNOWN_ONLY).jumpIf('eq', 1, 0, 'no rule');
  a.move(1, MARK_KNOWN_ONLY).store(4, PACKET, SKB.mark, reg(1)).jump('on its way');
  a.label('allowed').store(4, FRAME, KNOWN_ONLY, 0).label('on its way');
}

/** The kernel's own routes tell: an address of this machine is not to be forwarded, whichever it has now. */
function notThisMachine(a: BpfAssembler): void {
  const NOT_FORWARDED = 4;
  const AF_INET = 2;
  const AF_INET6 = 10;
  a.load(1, 1, FRAME, AT('protocol')).store(1, FRAME, ROUTE + 1, reg(1));
  a.load(4, 1, FRAME, AT('link')).store(4, FRAME, ROUTE + 8, reg(1));
  a.load(2, 1, FRAME, AT('etherType')).jumpIf('eq', 1, IPV4, 'route ipv4');
  a.store(1, FRAME, ROUTE, AF_INET6);
  copy(a, AT('source'), ROUTE + 16, 16);
  copy(a, AT('destination'), ROUTE + 32, 16);
  a.jump('route').label('route ipv4').store(1, FRAME, ROUTE, AF_INET);
  copy(a, AT('source') + 12, ROUTE + 16, 4);
  copy(a, AT('destination') + 12, ROUTE + 32, 4);
  a.label('route').move(1, reg(PACKET)).stack(2, ROUTE).move(3, 64).move(4, 0).call(HELPER.routeLookUp);
  a.jumpIf('eq', 0, NOT_FORWARDED, 'this machine').jump('passes');
}

function verdicts(a: BpfAssembler, maps: ProgramMaps): void {
  a.label('question').call(HELPER.now);
  inTime(a, STATE.askedUntil, ASK_EACH_NS, ASK_BURST_NS, 'too many questions');
  count(a.label('passes'), STATE.passed, STATE.passedBytes);
  a.return(TC_PASS);
  for (const [number, reason] of REASONS.entries()) {
    a.label(reason).store(1, FRAME, AT('reason'), number);
    // What every kernel says by itself is no attempt.
    a.jump(reason === 'quiet' ? 'dropped' : 'drops');
  }
  count(a.label('drops'), STATE.denied, STATE.deniedBytes);
  tell(a, maps);
  reset(a);
  a.label('dropped').return(TC_DROP);
}

function count(a: BpfAssembler, packets: number, bytes: number): void {
  a.move(1, 1).addAtomic(STATE_OF, packets, 1);
  a.load(4, 1, FRAME, AT('packetBytes')).addAtomic(STATE_OF, bytes, 1);
}

/** One each `eachNs` on average, and what fits into `burstNs` at once; else to `tooMany`. Register 0 holds the time. */
function inTime(a: BpfAssembler, at: number, eachNs: number, burstNs: number, tooMany: string): void {
  const late = a.fresh();
  a.load(8, 1, STATE_OF, at).jumpIf('ge', 1, reg(0), late).move(1, reg(0)).label(late);
  a.move(2, reg(1)).do('sub', 2, reg(0)).jumpIf('gt', 2, burstNs, tooMany);
  a.do('add', 1, eachNs).store(8, STATE_OF, at, reg(1));
}

/** Whoever floods is told of by the count alone: the ring belongs to all sandboxes. */
function tell(a: BpfAssembler, maps: ProgramMaps): void {
  const NO_WAKEUP = 1;
  a.call(HELPER.now).store(8, FRAME, AT('time'), reg(0));
  inTime(a, STATE.toldUntil, TELL_EACH_NS, TELL_BURST_NS, 'untold');
  a.map(1, maps.ring).stack(2, AT('time')).move(3, EVENT.sizeBytes).move(4, NO_WAKEUP).call(HELPER.ringOutput);
  a.jumpIf('eq', 0, 0, 'told').label('untold').move(1, 1).addAtomic(STATE_OF, STATE.untold, 1).label('told');
}

/**
 * The packet becomes the answer that its destination could have given, and goes back where it came from. The checksum of TCP may stay empty:
 * the packet is marked as one whose checksum the hardware makes, and between the two ends of a link nobody looks.
 */
function reset(a: BpfAssembler): void {
  const RST_ACK = 0x1450;
  a.load(4, 1, FRAME, BARE_SYN).jumpIf('eq', 1, 0, 'dropped');
  a.load(1, 1, FRAME, AT('reason')).jumpIf('gt', 1, REASONS.indexOf('this machine'), 'dropped');
  a.load(2, 9, FRAME, AT('etherType'))
    .move(TRANSPORT, 34)
    .jumpIf('eq', 9, IPV4, 'reset')
    .move(TRANSPORT, 54)
    .label('reset');
  a.move(1, reg(PACKET))
    .move(2, 0)
    .stack(3, HEADER + 16)
    .move(4, 12)
    .call(HELPER.loadBytes)
    .jumpIf('ne', 0, 0, 'dropped');
  a.move(1, reg(PACKET)).move(2, reg(TRANSPORT)).stack(3, HEADER).move(4, 16).call(HELPER.loadBytes);
  a.jumpIf('ne', 0, 0, 'dropped');
  // Hardware addresses, the other way round.
  for (let at = 0; at < 6; at += 2) {
    a.load(2, 1, FRAME, HEADER + 22 + at).store(2, FRAME, RESET + at, reg(1));
    a.load(2, 1, FRAME, HEADER + 16 + at).store(2, FRAME, RESET + 6 + at, reg(1));
  }
  const tcp = (at: number) => {
    a.load(2, 1, FRAME, HEADER + 2)
      .store(2, FRAME, at, reg(1))
      .load(2, 1, FRAME, HEADER)
      .store(2, FRAME, at + 2, reg(1));
    a.store(4, FRAME, at + 4, 0)
      .load(4, 1, FRAME, HEADER + 4)
      .swap(32, 1)
      .do('add', 1, 1)
      .swap(32, 1);
    a.store(4, FRAME, at + 8, reg(1))
      .store(4, FRAME, at + 12, RST_ACK)
      .store(4, FRAME, at + 16, 0);
  };
  a.jumpIf('ne', 9, IPV4, 'reset ipv6').store(2, FRAME, RESET + 12, 0x0008);
  // Version, length 40, not to be fragmented, 64 hops, TCP; the checksum follows.
  a.store(4, FRAME, RESET + 14, 0x28000045)
    .store(4, FRAME, RESET + 18, 0x00400000)
    .store(4, FRAME, RESET + 22, 0x0640);
  copy(a, AT('destination') + 12, RESET + 26, 4);
  copy(a, AT('source') + 12, RESET + 30, 4);
  a.move(1, 0)
    .move(2, 0)
    .stack(3, RESET + 14)
    .move(4, 20)
    .move(5, 0)
    .call(HELPER.checksumDifference);
  for (let fold = 0; fold < 2; fold++) a.move(1, reg(0)).do('rsh', 1, 16).do('and', 0, 0xffff).do('add', 0, reg(1));
  a.do('xor', 0, 0xffff).store(2, FRAME, RESET + 24, reg(0));
  tcp(RESET + 34);
  sendBack(a, 54);
  a.label('reset ipv6').store(2, FRAME, RESET + 12, 0xdd86);
  a.store(4, FRAME, RESET + 14, 0x60).store(4, FRAME, RESET + 18, 0x40061400);
  copy(a, AT('destination'), RESET + 22, 16);
  copy(a, AT('source'), RESET + 38, 16);
  tcp(RESET + 54);
  sendBack(a, 74);
}

function sendBack(a: BpfAssembler, bytes: number): void {
  a.move(1, reg(PACKET)).move(2, bytes).move(3, 0).call(HELPER.changeTail).jumpIf('ne', 0, 0, 'dropped');
  a.move(1, reg(PACKET)).move(2, 0).stack(3, RESET).move(4, bytes).move(5, 0).call(HELPER.storeBytes);
  a.jumpIf('ne', 0, 0, 'dropped');
  redirect(a);
}

function redirect(a: BpfAssembler): void {
  a.load(4, 1, FRAME, AT('link')).move(2, 0).call(HELPER.redirect).return();
}

const ANSWERS = (a: BpfAssembler): AnswerPlaces => ({
  ...STATE,
  packet: PACKET,
  state: STATE_OF,
  header: HEADER,
  answer: RESET,
  load: (from, to, bytes) => loadPacket(a, from, to, bytes),
  redirect: () => redirect(a),
});
