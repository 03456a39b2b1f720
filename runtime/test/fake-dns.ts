/** An upstream resolver on loopback that answers as it is told, and counts. It has its own encoder, with names compressed and not. */
import { createSocket, type RemoteInfo, type Socket } from 'node:dgram';
import { once } from 'node:events';
import { createServer, isIPv4, isIPv6, type Server } from 'node:net';

export interface FakeRecord {
  readonly name: string;
  readonly type: 'A' | 'AAAA' | 'CNAME' | 'TXT' | 'MX' | 'SOA';
  readonly value: string;
  readonly ttl?: number;
}

export interface FakeAnswer {
  readonly rcode?: number;
  readonly answers?: readonly FakeRecord[];
  readonly authorities?: readonly FakeRecord[];
  readonly truncated?: boolean;
  /** In place of all that. */
  readonly raw?: (query: Buffer) => readonly Buffer[];
  readonly silent?: boolean;
}

export interface FakeQuestion {
  /** Lower case. */
  readonly name: string;
  readonly type: number;
  readonly tcp: boolean;
  readonly query: Buffer;
  readonly from: RemoteInfo | undefined;
  readonly socket: Socket;
}

const NUMBERS = { A: 1, CNAME: 5, SOA: 6, MX: 15, TXT: 16, AAAA: 28 } as const;

export class FakeDns {
  /** Each question that came. */
  readonly asked: { name: string; spelled: string; type: number; tcp: boolean; port: number; id: number }[] = [];
  answer: (question: FakeQuestion) => FakeAnswer | Promise<FakeAnswer>;
  port = 0;
  private readonly udp = createSocket('udp4');
  private readonly tcp: Server;

  private constructor(answer: FakeDns['answer']) {
    this.answer = answer;
    this.udp.on('message', async (query, from) => {
      for (const bytes of await this.reply(query, false, from)) this.udp.send(bytes, from.port, from.address);
    });
    this.tcp = createServer((socket) => {
      let received = Buffer.alloc(0);
      socket.on('error', () => {});
      socket.on('data', async (bytes: Buffer) => {
        received = Buffer.concat([received, bytes]);
        if (received.length < 2 || received.length < 2 + received.readUInt16BE(0)) return;
        for (const reply of await this.reply(received.subarray(2), true, undefined)) {
          const head = Buffer.alloc(2);
          head.writeUInt16BE(reply.length);
          socket.write(Buffer.concat([head, reply]));
        }
      });
    });
  }

  static async open(answer: FakeDns['answer']): Promise<FakeDns> {
    const fake = new FakeDns(answer);
    for (;;) {
      fake.udp.bind(0, '127.0.0.1');
      await once(fake.udp, 'listening');
      fake.port = fake.udp.address().port;
      fake.tcp.listen(fake.port, '127.0.0.1');
      await once(fake.tcp, 'listening');
      return fake;
    }
  }

  get server() {
    return { address: '127.0.0.1', port: this.port };
  }

  close(): void {
    this.udp.close();
    this.tcp.close();
  }

  private async reply(query: Buffer, tcp: boolean, from: RemoteInfo | undefined): Promise<readonly Buffer[]> {
    const { spelled, end } = questionOf(query);
    const type = query.readUInt16BE(end);
    const name = spelled.toLowerCase();
    this.asked.push({ name, spelled, type, tcp, port: from?.port ?? 0, id: query.readUInt16BE(0) });
    const answer = await this.answer({ name, type, tcp, query, from, socket: this.udp });
    if (answer.silent) return [];
    return answer.raw?.(query) ?? [replyTo(query, answer)];
  }
}

export function questionOf(query: Buffer): { spelled: string; end: number } {
  const labels: string[] = [];
  let at = 12;
  for (; query[at] !== 0; at += query[at]! + 1) labels.push(query.toString('latin1', at + 1, at + 1 + query[at]!));
  return { spelled: labels.join('.'), end: at + 1 };
}

export function replyTo(query: Buffer, { rcode = 0, answers = [], authorities = [], truncated }: FakeAnswer): Buffer {
  const { spelled, end } = questionOf(query);
  const header = Buffer.from(query.subarray(0, 12));
  header.writeUInt16BE(0x8180 | (truncated ? 0x200 : 0) | rcode, 2);
  header.writeUInt16BE(1, 4);
  header.writeUInt16BE(answers.length, 6);
  header.writeUInt16BE(authorities.length, 8);
  header.writeUInt16BE(0, 10);
  const question = query.subarray(12, end + 4);
  return Buffer.concat([header, question, ...[...answers, ...authorities].map((one) => recordBytes(one, spelled))]);
}

/** Compressed where it is the name of the question. */
function recordBytes({ name, type, value, ttl = 300 }: FakeRecord, asked: string): Buffer {
  const owner = name === asked.toLowerCase() ? Buffer.from([0xc0, 12]) : nameBytes(name);
  const data = dataBytes(type, value);
  const fixed = Buffer.alloc(10);
  fixed.writeUInt16BE(NUMBERS[type], 0);
  fixed.writeUInt16BE(1, 2);
  fixed.writeUInt32BE(ttl, 4);
  fixed.writeUInt16BE(data.length, 8);
  return Buffer.concat([owner, fixed, data]);
}

export function nameBytes(name: string): Buffer {
  const labels = name === '' ? [] : name.split('.');
  return Buffer.concat([
    ...labels.map((label) => Buffer.from([label.length, ...Buffer.from(label)])),
    Buffer.from([0]),
  ]);
}

function dataBytes(type: FakeRecord['type'], value: string): Buffer {
  if (isIPv4(value)) return Buffer.from(value.split('.').map(Number));
  if (isIPv6(value)) {
    const [head, tail = ''] = value.split('::') as [string, string?];
    const groups = (text: string) => (text === '' ? [] : text.split(':').map((group) => Number.parseInt(group, 16)));
    const [before, after] = [groups(head), groups(tail)];
    const all = [...before, ...Array<number>(8 - before.length - after.length).fill(0), ...after];
    return Buffer.concat(all.map((group) => Buffer.from([group >> 8, group & 255])));
  }
  if (type === 'TXT') return Buffer.concat([Buffer.from([value.length]), Buffer.from(value)]);
  if (type === 'MX') return Buffer.concat([Buffer.from([0, 10]), nameBytes(value)]);
  if (type === 'SOA') {
    const numbers = Buffer.alloc(20);
    numbers.writeUInt32BE(Number(value), 16);
    return Buffer.concat([nameBytes('ns.test'), nameBytes('admin.test'), numbers]);
  }
  return nameBytes(value);
}
