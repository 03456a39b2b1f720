/**
 * Which program tried what. The packet filter sees packets, not processes; so whoever in a sandbox connects, or sends without connecting, is
 * noted as it asks the kernel for it: hooks at the root of the cgroup v2 tree, which allow everything and are there as long as this process
 * is. A note is found by the sandbox's network namespace and the destination. Raw sockets come by no hook: their program stays unknown.
 */
import { closeSync, openSync, readFileSync } from 'node:fs';
import { bytesOf } from '#base';
import { bpf, type MountRow, netlink, readMountInfo } from '#linux';
import { BpfAssembler, FRAME, HELPER, reg } from './bpf-assembler.ts';

export interface ProgramNote {
  /** As the kernel has it, at most 15 bytes. */
  readonly program: string;
  /** On this machine; it may be another one's by now. */
  readonly pid: number;
  readonly uid: number;
}

const NOTES = 8192;
const KEY = { cookie: 0, destination: 8, port: 24, protocol: 26, sizeBytes: 32 } as const;
const VALUE = { pid: 0, uid: 4, name: 8, sizeBytes: 24 } as const;
/** Offsets in struct bpf_sock_addr. */
const CONTEXT = { ip4: 4, ip6: 8, port: 24, protocol: 36 } as const;
const CONTEXT_REGISTER = 6;

export class ProgramNotes {
  private readonly map: number;
  private readonly links: readonly number[];

  private constructor(map: number, links: readonly number[]) {
    this.map = map;
    this.links = links;
  }

  /** @throws SyscallError where the kernel or the cgroup tree has no such hooks */
  static open(rows: readonly MountRow[] = readMountInfo()): ProgramNotes {
    const tree = rows.find((row) => row.type === 'cgroup2');
    if (tree === undefined) throw new Error('no cgroup2 tree is mounted');
    const map = bpf.createMap({
      name: 'dsec_notes',
      type: bpf.BPF_MAP.lruHash,
      keyBytes: KEY.sizeBytes,
      valueBytes: VALUE.sizeBytes,
      entries: NOTES,
    });
    const links: number[] = [];
    const root = openSync(bytesOf(tree.mountPoint), 'r');
    try {
      const own = ownCookie();
      for (const [attach, isIPv6] of HOOKS) {
        const code = noteProgram(map, isIPv6, own);
        const program = bpf.loadProgram({ name: 'dsec_note', type: bpf.BPF_PROGRAM.cgroupSocketAddress, code, attach });
        try {
          links.push(bpf.createLink(program, root, attach));
        } finally {
          closeSync(program);
        }
      }
      return new ProgramNotes(map, links);
    } catch (error) {
      for (const fd of [map, ...links]) closeSync(fd);
      throw error;
    } finally {
      closeSync(root);
    }
  }

  close(): void {
    for (const fd of [...this.links, this.map]) closeSync(fd);
  }

  /** @param destination Sixteen bytes. */
  find(cookie: bigint, destination: Buffer, port: number, protocol: number): ProgramNote | undefined {
    const key = Buffer.alloc(KEY.sizeBytes);
    key.writeBigUInt64LE(cookie, KEY.cookie);
    destination.copy(key, KEY.destination);
    key.writeUInt16LE(port, KEY.port);
    key[KEY.protocol] = protocol;
    const value = bpf.lookUp(this.map, key, VALUE.sizeBytes);
    if (value === undefined) return undefined;
    const name = value.subarray(VALUE.name);
    const end = name.indexOf(0);
    return {
      program: name.toString('utf8', 0, end < 0 ? name.length : end),
      pid: value.readUInt32LE(VALUE.pid),
      uid: value.readUInt32LE(VALUE.uid),
    };
  }
}

const HOOKS = [
  [bpf.BPF_ATTACH.inet4Connect, false],
  [bpf.BPF_ATTACH.inet6Connect, true],
  [bpf.BPF_ATTACH.udp4Send, false],
  [bpf.BPF_ATTACH.udp6Send, true],
] as const;

function ownCookie(): bigint {
  const socket = new netlink.NetlinkSocket();
  try {
    return socket.namespaceCookie();
  } finally {
    socket.close();
  }
}

/** @param own This machine's namespace: what runs in it is no business of ours. */
function noteProgram(map: number, isIPv6: boolean, own: bigint): Buffer {
  const key = -KEY.sizeBytes;
  const value = key - VALUE.sizeBytes;
  const a = new BpfAssembler();
  a.move(CONTEXT_REGISTER, reg(1));
  for (let at = value; at < 0; at += 8) a.store(8, FRAME, at, 0);
  a.move(1, reg(CONTEXT_REGISTER)).call(HELPER.namespaceCookie).wide(1, own).jumpIf('eq', 0, reg(1), 'done');
  a.store(8, FRAME, key + KEY.cookie, reg(0));
  const destination = key + KEY.destination;
  if (isIPv6) {
    for (let at = 0; at < 16; at += 4) {
      a.load(4, 1, CONTEXT_REGISTER, CONTEXT.ip6 + at).store(4, FRAME, destination + at, reg(1));
    }
  } else {
    a.load(4, 1, CONTEXT_REGISTER, CONTEXT.ip4).store(4, FRAME, destination + 12, reg(1));
    a.store(4, FRAME, destination + 8, 0xffff0000);
  }
  a.load(4, 1, CONTEXT_REGISTER, CONTEXT.port)
    .swap(16, 1)
    .store(2, FRAME, key + KEY.port, reg(1));
  a.load(4, 1, CONTEXT_REGISTER, CONTEXT.protocol).store(1, FRAME, key + KEY.protocol, reg(1));
  a.call(HELPER.currentPid)
    .do('rsh', 0, 32)
    .store(4, FRAME, value + VALUE.pid, reg(0));
  a.call(HELPER.currentUser).store(4, FRAME, value + VALUE.uid, reg(0));
  a.stack(1, value + VALUE.name)
    .move(2, 16)
    .call(HELPER.currentName);
  a.map(1, map).stack(2, key).stack(3, value).move(4, 0).call(HELPER.update);
  return a.label('done').return(1).build();
}

/** Path of the program while it runs. */
export function executableOf(pid: number, name: string): string | undefined {
  try {
    if (readFileSync(`/proc/${pid}/comm`, 'utf8').trimEnd() !== name) return undefined;
    return readFileSync(`/proc/${pid}/cmdline`, 'latin1').split('\0')[0];
  } catch {
    return undefined;
  }
}
