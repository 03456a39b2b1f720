/** What tests of networks do inside of a sandbox: with bash's own sockets, and, as more than root there can be, from its namespace. */
import { execFileSync } from 'node:child_process';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { processesOf, say } from './resident-fixture.ts';

const bash = (sandbox: NodeSandbox, script: string) =>
  say(sandbox, 'exec 2>&1; eval "$SCRIPT"', {
    args: ['bash', '-c', 'exec 2>&1; eval "$SCRIPT"'],
    env: [`SCRIPT=${script}`],
  });

/** What the host said, "refused", or what went wrong. */
export async function tcp(sandbox: NodeSandbox, host: string, port: number): Promise<string> {
  const said = await bash(
    sandbox,
    `exec 3<>/dev/tcp/${host}/${port} || exit; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; while read -t 20 line <&3; do last=$line; done; echo "$last"`,
  );
  if (said.includes('refused')) return 'refused';
  return /not known|resolution/.test(said) ? 'no name' : said.trim();
}

/** What the host said; nothing when it said nothing for a while. */
export async function udp(sandbox: NodeSandbox, host: string, port: number, waitS = 1): Promise<string> {
  const said = await bash(
    sandbox,
    `exec 3<>/dev/udp/${host}/${port} || exit; echo hi >&3; dd bs=200 count=1 status=none <&3 & one=$!; (sleep ${waitS}; kill $one) >/dev/null 2>&1 & wait $one`,
  );
  return said.trim();
}

/** Python in the sandbox's network namespace, with all the rights of this machine's root. */
export function inNamespace(sandbox: NodeSandbox, program: string): string {
  return inNamespaceOf(processesOf(sandbox)[0]!, program);
}

export function inNamespaceOf(pid: number, program: string): string {
  return execFileSync('nsenter', [`--net=/proc/${pid}/ns/net`, 'python3', '-c', program], { encoding: 'utf8' });
}

/** For `inNamespace`: packets made by hand. */
export const RAW_PACKETS = `
import socket, struct
def checksum(b):
    b = b + b'\\0' * (len(b) % 2)
    s = sum(struct.unpack('!%dH' % (len(b) // 2), b))
    while s >> 16: s = (s & 0xffff) + (s >> 16)
    return ~s & 0xffff
def udp(source, port, data=b'hello'):
    return struct.pack('!HHHH', source, port, 8 + len(data), 0) + data
def ip(source, to, protocol, data, flags=0, options=b''):
    words = 5 + len(options) // 4
    head = struct.pack('!BBHHHBBH', 0x40 | words, 0, words * 4 + len(data), 7, flags, 64, protocol, 0)
    head += socket.inet_aton(source) + socket.inet_aton(to) + options
    return head[:10] + struct.pack('!H', checksum(head)) + head[12:] + data
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
link.bind(('eth0', 0))
own = link.getsockname()[4]
there = b'\\x06' + own[1:]
def send(data, kind=0x0800):
    link.send(there + own + struct.pack('!H', kind) + data)
`;
