/**
 * A machine of its own for tests of networks: this process, and all that it starts, moves into a fresh network namespace, and behind a link of
 * that lies an internet with a few hosts, which answer on every address and port that a test asks for. Nothing of it is seen by the machine.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createRequire } from 'node:module';

const CLONE_NEWNET = 0x40000000;

/** Of the internet's hosts: one that policies allow, its neighbour, and one more. */
export const HOST4 = '93.184.216.34';
export const NEIGHBOUR4 = '93.184.216.35';
export const HOST6 = '2a00:5ec::34';
export const NEIGHBOUR6 = '2a00:5ec::35';
/** Of this machine, on its link to the internet. */
export const MACHINE4 = '93.184.216.1';
export const MACHINE6 = '2a00:5ec::1';

/** Says what it saw: tcp and udp, port, and from where. */
const SERVERS = `
const net = require('node:net'), dgram = require('node:dgram');
const says = (kind, port, from) => kind + ' ' + port + ' ' + from.replace('::ffff:', '') + '\\n';
let waiting = 0;
const ready = () => { if (--waiting === 0) console.log('ready'); };
for (const port of [22, 80, 443, 8080]) {
  waiting += 1;
  // An answer to HTTP too, so that wget shows it. A connection lives on: "more" is answered with "more".
  net.createServer({ allowHalfOpen: true }, (socket) => {
    socket.on('error', () => {});
    socket.on('data', (bytes) => {
      if (bytes.toString().startsWith('GET')) {
        socket.end('HTTP/1.0 200 OK\\r\\n\\r\\n' + says('tcp', port, socket.remoteAddress));
      } else socket.write(bytes);
    });
    socket.on('end', () => socket.end());
  }).listen(port, '::', ready);
  // Each address its own: an answer has to come from where the question went.
  for (const address of ["${HOST4}", "${NEIGHBOUR4}", "${HOST6}", "${NEIGHBOUR6}"]) {
    waiting++;
    const udp = dgram.createSocket(address.includes(':') ? 'udp6' : 'udp4');
    udp.on('message', (bytes, from) => udp.send(says('udp', port, from.address), from.port, from.address));
    udp.bind(port, address, ready);
  }
}
`;

export class NetworkWorld {
  private readonly internet: ChildProcess;

  private constructor(internet: ChildProcess) {
    this.internet = internet;
  }

  /** Once in a process: it does not come back. */
  static async open(): Promise<NetworkWorld> {
    const koffi = createRequire(import.meta.url)('koffi');
    const unshare = koffi.load(null).func('unshare', 'int', ['int']) as (flags: number) => number;
    if (unshare(CLONE_NEWNET) !== 0) throw new Error('no network namespace');
    const internet = spawn(
      'unshare',
      ['-n', process.execPath, '-e', `process.stdin.once('data', () => {${SERVERS}})`],
      {
        stdio: ['pipe', 'pipe', 'inherit'],
      },
    );
    const pid = internet.pid!;
    const other = () => execFileSync('readlink', [`/proc/${pid}/ns/net`]).toString();
    const own = execFileSync('readlink', ['/proc/self/ns/net']).toString();
    for (const deadline = Date.now() + 30_000; other() === own; ) {
      if (Date.now() > deadline) throw new Error('the internet does not come up');
    }
    const inside = ['nsenter', `--net=/proc/${pid}/ns/net`];
    const run = (...line: string[]) => execFileSync(line[0]!, line.slice(1));
    run('ip', 'link', 'add', 'up0', 'type', 'veth', 'peer', 'name', 'up1', 'netns', String(pid));
    for (const [address, ns] of [
      [`${MACHINE4}/24`, []],
      [`${MACHINE6}/64`, []],
      [`${HOST4}/24`, inside],
      [`${NEIGHBOUR4}/24`, inside],
      [`${HOST6}/64`, inside],
      [`${NEIGHBOUR6}/64`, inside],
    ] as const) {
      const link = ns.length === 0 ? 'up0' : 'up1';
      run(...ns, 'ip', 'addr', 'add', address, 'dev', link, ...(address.includes(':') ? ['nodad'] : []));
    }
    for (const ns of [[], inside]) {
      run(...ns, 'ip', 'link', 'set', 'lo', 'up');
      run(...ns, 'ip', 'link', 'set', ns.length === 0 ? 'up0' : 'up1', 'up');
    }
    const ready = once(internet.stdout!, 'data');
    internet.stdin!.write('go\n');
    await ready;
    return new NetworkWorld(internet);
  }

  close(): void {
    this.internet.kill('SIGKILL');
  }
}

/** What of DSec is in this namespace. */
export function networkLeft(): string[] {
  const lines = (command: string, ...args: string[]) => execFileSync(command, args).toString().split('\n');
  return [
    ...lines('ip', '-o', 'link').filter((line) => line.includes(' dsv')),
    ...lines('nft', 'list', 'tables').filter((line) => line.includes('dsec')),
    ...lines('ip', '-o', 'addr', 'show', 'dev', 'lo').filter(
      (line) => !/ (127\.0\.0\.1|::1)\//.test(line) && line !== '',
    ),
    ...lines('ip', 'route').filter((line) => line.includes('dsv')),
  ];
}
