/**
 * The Firecracker driver against a stand-in that serves its API and keeps its rules (stand-in-firecracker.mjs): what it asks for, in which order, what it leaves.
 * And against Firecracker itself where $DSEC_FIRECRACKER names one and there is a /dev/kvm, running or not: all but what needs a guest.
 */
import {
  appendFileSync,
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, afterEach, describe, expect, it } from 'vitest';
import { readMountInfo } from '#linux';
import { firecrackerState } from '../vm/firecracker/find-firecracker.ts';
import { openFirecrackerDriver } from '../vm/firecracker/firecracker-driver.ts';
import { jailerCommand, makeRoot, removeRoot } from '../vm/firecracker/jail.ts';
import { connectVsock } from '../vm/firecracker/vsock.ts';
import type { VmSpec } from '../vm/vm-driver.ts';

const standIn = fileURLToPath(new URL('stand-in-firecracker.mjs', import.meta.url));
const MIB = 2 ** 20;
const isRoot = process.getuid?.() === 0;
const scratch = mkdtempSync(join(tmpdir(), 'dsec-fc-'));
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

interface Note {
  readonly request?: string;
  readonly body?: Record<string, unknown>;
  readonly started?: string[];
  readonly cwd?: string;
  readonly vsock?: string;
}

let made = 0;
const ends: (() => Promise<void>)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0)) await end();
});

/** A machine's folder, a Firecracker that notes what it is asked, and a jailer that does what the jailer does, but for the jail. */
function site(config: object = {}, { jailed = false } = {}) {
  const folder = join(scratch, `vm${++made}`);
  mkdirSync(folder, { mode: 0o700 });
  const file = (name: string, bytes: number | string) => {
    const path = join(scratch, `${name}${made}`);
    writeFileSync(path, typeof bytes === 'string' ? bytes : '');
    if (typeof bytes === 'number') truncateSync(path, bytes);
    return path;
  };
  const notes = file('notes', '');
  const settings = file('config', JSON.stringify({ notes, ...config }));
  const binary = file('firecracker', `#!/bin/sh\nexec ${process.execPath} ${standIn} --config ${settings} "$@"\n`);
  const jailer = file(
    'jailer',
    `#!/bin/sh\necho "{\\"started\\": [\\"$*\\"]}" >> ${notes}\nwhile [ "$1" != -- ]; do eval "\${1#--}=\\$2" 2>/dev/null || case $1 in --exec-file) exec_file=$2 ;; --chroot-base-dir) base=$2 ;; esac; shift 2; done; shift\ncd "$base/$(basename "$exec_file")/$id/root" || exit 1\nexec "$exec_file" --id "$id" "$@"\n`,
  );
  for (const path of [binary, jailer]) chmodSync(path, 0o755);
  const elf = file('vmlinux', '\x7fELF and so on');
  const spec: VmSpec = {
    id: `box_${made}`,
    folder,
    boot: { kernel: elf, commandLine: 'quiet' },
    cpus: 1,
    memoryBytes: 8 * MIB,
    memoryFile: join(scratch, `memory${made}`),
    drives: [
      { id: 'base', source: { file: file('layer', 2 * MIB) }, readOnly: true, transport: 'pmem' },
      { id: 'upper', source: { file: file('upper', MIB) }, readOnly: false, transport: 'blk' },
    ],
    ports: [{ name: 'agent', socket: '' }],
    balloon: { freePageReporting: true },
  };
  const driver = openFirecrackerDriver({ binary, jailer: jailed ? jailer : 'none', kvm: '/dev/null' });
  ends.push(() => driver.sweep(folder));
  const noted = (): Note[] =>
    readFileSync(notes, 'utf8')
      .split('\n')
      .filter(Boolean)
      .map((line) => JSON.parse(line) as Note);
  const changes = () => noted().flatMap(({ request }) => (request?.startsWith('GET') === false ? [request] : []));
  return { folder, spec, driver, noted, changes, binary, jailer };
}

const mountsIn = (folder: string) => readMountInfo().filter(({ mountPoint }) => String(mountPoint).startsWith(folder));

/** Only what the next machine of this folder may find. */
function expectNothingLeft(folder: string) {
  expect(readdirSync(folder).filter((name) => name !== 'lock' && name !== 'console.log')).toEqual([]);
  expect(mountsIn(folder)).toEqual([]);
}

describe('the Firecracker driver', { timeout: 120_000 }, () => {
  it('configures, then starts, and the machine goes on and stands still as it is told', async () => {
    const { spec, driver, noted, changes, folder } = site();
    const vm = await driver.start(spec);
    const before = [
      'PUT /machine-config',
      'PUT /boot-source',
      'PUT /pmem/base',
      'PUT /drives/upper',
      'PUT /vsock',
      'PUT /balloon',
      'PUT /entropy',
      'PUT /actions',
    ];
    expect(changes()).toEqual(before);
    expect(await vm.state()).toBe('running');
    await vm.stop();
    expect(await vm.state()).toBe('stopped');
    await vm.cont();
    await vm.setBalloon(5 * MIB);
    expect(changes().slice(before.length)).toEqual(['PATCH /vm', 'PATCH /vm', 'PATCH /balloon']);
    expect(noted().at(-1)!.body).toEqual({ amount_mib: 3 });
    expect(noted()[0]).toEqual({
      started: [
        '--id',
        spec.id.replace('_', '-'),
        '--api-sock',
        'api.sock',
        '--log-path',
        'firecracker.log',
        '--level',
        'Info',
        '--enable-pci',
      ],
      cwd: join(folder, 'root'),
    });
    await vm.kill();
    expect(await vm.ended).toEqual({ reason: 'killed', detail: 'it was killed' });
    expect(vm.console.recent().toString()).toBe(`console of ${spec.id.replace('_', '-')}\n`);
    expectNothingLeft(folder);
    await expect(vm.cont()).rejects.toMatchObject({ code: 'VM_GONE' });
    await vm.kill();
  });

  it('tells a guest that is done from a process that has gone', async () => {
    const done = site();
    const first = await done.driver.start(done.spec);
    await first.powerDown();
    expect((await first.ended).reason).toBe('guest');
    expectNothingLeft(done.folder);
    const gone = site();
    const second = await gone.driver.start(gone.spec);
    process.kill(second.pid, 'SIGKILL');
    expect((await second.ended).reason).toBe('crashed');
    expectNothingLeft(gone.folder);
  });

  it('leaves nothing when a request is refused, and says which and why', async () => {
    const { spec, driver, folder } = site({ refuse: { 'PUT /drives/upper': 'the disk is odd' } });
    await expect(driver.start(spec)).rejects.toMatchObject({
      code: 'VM_START',
      message: expect.stringContaining('PUT /drives/upper: the disk is odd'),
    });
    expectNothingLeft(folder);
    const broken = site();
    chmodSync(broken.binary, 0o755);
    writeFileSync(
      broken.binary,
      '#!/bin/sh\n[ "$1" = --version ] && echo v1.15.1 && exit 0\necho "no KVM" >&2; exit 1\n',
    );
    await expect(broken.driver.start(broken.spec)).rejects.toMatchObject({
      code: 'VM_START',
      message: expect.stringContaining('no KVM'),
    });
    expectNothingLeft(broken.folder);
  });

  it('does not start a second one in a folder, and leaves the first alone', async () => {
    const { spec, driver } = site();
    const vm = await driver.start(spec);
    await expect(driver.start(spec)).rejects.toMatchObject({ code: 'VM_START' });
    expect(await vm.state()).toBe('running');
  });

  it('finds a machine again that outlived its service, and nothing where there is none', async () => {
    const { spec, driver, folder } = site();
    const vm = await driver.start(spec);
    const found = await driver.find(folder);
    expect(found).toMatchObject({ pid: vm.pid, agentSocket: join(folder, 'root/v.sock'), agentVsockPort: 1024 });
    expect(await found!.state()).toBe('running');
    await found!.kill();
    expect(await driver.find(folder)).toBeUndefined();
    expectNothingLeft(folder);
  });

  it('keeps snapshots as layers: all of it, then what was written since', async () => {
    const { spec, driver, noted, folder } = site();
    const vm = await driver.start(spec);
    const [first, second, other] = ['a', 'b', 'c'].map((name) => join(scratch, `snapshot-${name}`)) as [
      string,
      string,
      string,
    ];
    expect(await vm.snapshot(first)).toMatchObject({ changedPages: 1, zeroPages: 0, stateBytes: 16 });
    expect(await vm.state()).toBe('stopped');
    await vm.cont();
    expect(await vm.snapshot(second, { base: first })).toMatchObject({ changedPages: 1, zeroPages: 0 });
    const types = () =>
      noted().flatMap(({ request, body }) => (request === 'PUT /snapshot/create' ? [body!.snapshot_type] : []));
    expect(types()).toEqual(['Full', 'Diff']);
    // Its pages are not counted from that one any more: all of them, compared. The page of the first is the only one that is the same.
    expect(await vm.snapshot(other, { base: first })).toMatchObject({ changedPages: 0 });
    expect(types()).toEqual(['Full', 'Diff', 'Full']);
    expect(existsSync(join(folder, 'root/snapshot'))).toBe(false);
    await vm.kill();

    for (const memory of ['copied', 'private'] as const) {
      const again = site();
      const restored = await again.driver.restore({ ...again.spec, memoryBytes: 8 * MIB }, second, { memory });
      expect(await restored.state()).toBe('stopped');
      expect(again.changes()).toEqual(['PUT /snapshot/load']);
      const [one, two] = [0, 4096].map((at) => readFileSync(join(again.folder, 'root/loaded')).subarray(at, at + 4096));
      expect(one).toEqual(Buffer.alloc(4096, 'Full'));
      expect(two).toEqual(Buffer.alloc(4096, 'Diff'));
      expect(existsSync(again.spec.memoryFile)).toBe(memory === 'copied');
      await restored.cont();
      await restored.kill();
      expect(existsSync(again.spec.memoryFile)).toBe(false);
      expectNothingLeft(again.folder);
    }
    expect(existsSync(join(second, 'memory.shared'))).toBe(true);
    driver.forgetSnapshot(second);
    expect(existsSync(join(second, 'memory.shared'))).toBe(false);
  });

  it('goes on when a snapshot fails, and the next one has everything', async () => {
    const { spec, driver, noted } = site({ refuse: { 'PUT /snapshot/create': 'No space left on device' } });
    const vm = await driver.start(spec);
    const folder = join(scratch, 'snapshot-full');
    await expect(vm.snapshot(folder)).rejects.toMatchObject({
      code: 'VM_SNAPSHOT',
      message: expect.stringContaining('No space left on device'),
    });
    expect(await vm.state()).toBe('running');
    expect(existsSync(folder) || existsSync(`${folder}.part`)).toBe(false);
    await vm.stop();
    await expect(vm.snapshot(folder)).rejects.toMatchObject({ code: 'VM_SNAPSHOT' });
    expect(await vm.state()).toBe('stopped');
    await expect(vm.snapshot(folder, { signal: AbortSignal.abort() })).rejects.toMatchObject({ code: 'VM_SNAPSHOT' });
    expect(noted().filter(({ request }) => request === 'PUT /snapshot/create').length).toBe(2);
  });

  it('refuses snapshots that are damaged or of another size before it starts anything', async () => {
    const { spec, driver, folder } = site();
    const vm = await driver.start(spec);
    const snapshot = join(scratch, 'snapshot-damaged');
    await vm.snapshot(snapshot);
    await vm.kill();
    await expect(driver.restore({ ...spec, memoryBytes: 16 * MIB }, snapshot)).rejects.toMatchObject({
      code: 'VM_SPEC',
    });
    rmSync(join(snapshot, 'state'));
    await expect(driver.restore(spec, snapshot)).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
    await expect(driver.restore(spec, join(scratch, 'none'))).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
    expectNothingLeft(folder);
    expect(existsSync(spec.memoryFile)).toBe(false);
  });

  it('reaches ports of the guest through vsock, and says what is wrong with those it does not', async () => {
    const { spec, driver, noted } = site();
    const vm = await driver.start(spec);
    const socket = await connectVsock(vm.agentSocket!, vm.agentVsockPort!);
    const got: Buffer[] = [];
    const echoed = new Promise<void>((resolve) => {
      socket.on('data', (bytes: Buffer) => {
        got.push(bytes);
        if (Buffer.concat(got).toString() === 'from the guesthello') resolve();
      });
    });
    socket.resume();
    socket.write('hello');
    await echoed;
    socket.destroy();
    expect(noted().at(-1)!.vsock).toBe('CONNECT 1024\n');
    await expect(connectVsock(join(scratch, 'nothing'), 5)).rejects.toMatchObject({
      code: 'VM_VSOCK',
      retryable: true,
    });
    for (const [how, problem] of [
      ['close', 'nobody listens'],
      ['garbage', 'no OK'],
      ['silent', 'no answer'],
    ] as const) {
      const other = site({ vsock: how });
      const broken = await other.driver.start(other.spec);
      const reached = connectVsock(broken.agentSocket!, 1024, { timeoutMs: how === 'silent' ? 200 : 60_000 });
      await expect(reached, how).rejects.toMatchObject({ code: 'VM_VSOCK', message: expect.stringContaining(problem) });
    }
  });

  it('says what is missing: KVM, the program, a version that it takes', () => {
    const { binary } = site();
    const code = 'RUNTIME_UNSUPPORTED';
    const opened = (options: object) => () =>
      openFirecrackerDriver({ binary, jailer: 'none', kvm: '/dev/null', ...options });
    expect(opened({ kvm: '/dev/no-kvm' })).toThrow(
      expect.objectContaining({ code, message: expect.stringContaining('no /dev/no-kvm') }),
    );
    expect(opened({ binary: '/nowhere/firecracker' })).toThrow('no firecracker in PATH');
    const old = join(scratch, 'old');
    writeFileSync(old, '#!/bin/sh\necho Firecracker v1.16.0\n', { mode: 0o755 });
    expect(opened({ binary: old })).toThrow(/1\.16\.0, which is refused.*5969/);
    const { missing, version } = firecrackerState({ binary, jailer: 'none', kvm: '/dev/null' });
    expect([missing, version]).toEqual([undefined, { major: 1, minor: 15, patch: 1 }]);
    if (isRoot) expect(opened({ jailer: '/nowhere/jailer' })).toThrow('only in its jail');
  });
});

describe('Firecracker’s jailer', { timeout: 120_000 }, () => {
  it('is given the user, the namespace, the groups and the limits', () => {
    const options = {
      jailer: '/usr/bin/jailer',
      uid: 1001,
      gid: 1002,
      netns: '/run/netns/a',
      cgroups: ['cpu.weight=1', 'memory.max=1000'],
      cgroupVersion: 2 as const,
      parentCgroup: 'dsec',
      maxFileBytes: 5000,
      maxOpenFiles: 64,
    };
    const words = jailerCommand('/opt/firecracker', '/state/vm', 'box_1.x', options).join(' ');
    expect(words).toBe(
      '/usr/bin/jailer --id box-1-x --exec-file /opt/firecracker --uid 1001 --gid 1002 --chroot-base-dir /state/vm/jail --netns /run/netns/a ' +
        '--cgroup cpu.weight=1 --cgroup memory.max=1000 --cgroup-version 2 --parent-cgroup dsec --resource-limit fsize=5000 --resource-limit no-file=64 ' +
        '-- --api-sock api.sock --log-path firecracker.log --level Info --enable-pci',
    );
  });

  it.skipIf(!isRoot)('has the files of its machine, and no others; they go with it', async () => {
    const { spec, driver, noted, folder } = site({}, { jailed: true });
    const vm = await driver.start(spec);
    const user = Number(/--uid (\d+)/.exec(noted()[0]!.started![0]!)![1]);
    expect(user).toBeGreaterThanOrEqual(0x7000_0000);
    const files = join(folder, 'root/files');
    expect(readdirSync(files).sort()).toEqual(['drive-base', 'drive-upper', 'kernel']);
    const upper = (spec.drives[1]!.source as { file: string }).file;
    expect(statSync(join(files, 'drive-upper'))).toMatchObject({ ino: statSync(upper).ino, uid: user, gid: user });
    appendFileSync(join(files, 'drive-upper'), '');
    expect(() => appendFileSync(join(files, 'drive-base'), 'x')).toThrow(/EROFS/);
    expect(mountsIn(folder).length).toBe(3);
    await vm.snapshot(join(scratch, 'snapshot-jailed'));
    await vm.kill();
    expectNothingLeft(folder);
  });

  it.skipIf(!isRoot)('leaves nothing either when the service was killed before there was a process', async () => {
    const { spec, driver, folder, binary, jailer } = site({}, { jailed: true });
    const files = [{ name: 'drive-base', source: (spec.drives[0]!.source as { file: string }).file, readOnly: true }];
    makeRoot(spec, binary, files, { jailer, uid: 1001, gid: 1001 });
    expect(mountsIn(folder).length).toBe(1);
    expect(await driver.find(folder)).toBeUndefined();
    expectNothingLeft(folder);
    removeRoot(folder);
    const closed = { name: 'closed', source: join(scratch, 'closed'), readOnly: true };
    writeFileSync(closed.source, 'x', { mode: 0o600 });
    expect(() => makeRoot(spec, binary, [closed], { jailer, uid: 1001, gid: 1001 })).toThrow(
      /cannot be read by user 1001/,
    );
    expect(() => makeRoot(spec, binary, [{ ...closed, source: '/nowhere' }], undefined)).toThrow(/is not there/);
    expect(() => makeRoot(spec, binary, [{ ...closed, source: scratch }], undefined)).toThrow(/neither a file/);
    removeRoot(folder);
    expectNothingLeft(folder);
  });
});

const real = process.env.DSEC_FIRECRACKER;
const canOpen = real !== undefined && existsSync('/dev/kvm');
if (!canOpen) console.log('skipped: Firecracker itself; $DSEC_FIRECRACKER is not set, or there is no /dev/kvm');

describe.skipIf(!canOpen)('Firecracker itself', { timeout: 300_000 }, () => {
  it('takes all that the driver asks for; snapshots, one on the other, come back', async () => {
    const jailed = process.env.DSEC_JAILER !== undefined && isRoot;
    const kernel = join(scratch, 'real-kernel');
    writeFileSync(kernel, readFileSync(process.env.DSEC_TEST_KERNEL ?? `/boot/vmlinuz`), { mode: 0o644 });
    const driver = openFirecrackerDriver({
      binary: real!,
      jailer: jailed ? process.env.DSEC_JAILER! : 'none',
      kvm: '/dev/null',
    });
    const { spec } = site();
    const drives = [
      ...spec.drives.slice(0, 1),
      { ...spec.drives[1]!, limit: { bytesPerSecond: 1e6, operationsPerSecond: 9 } },
    ];
    const machine = (folder: string): VmSpec => {
      mkdirSync(folder, { mode: 0o700 });
      ends.push(() => driver.sweep(folder));
      return { ...spec, folder, drives, memoryBytes: 128 * MIB, boot: { kernel, commandLine: 'console=ttyS0' } };
    };
    const vm = await driver.start(machine(join(scratch, 'real1')));
    expect(await vm.state()).toBe('running');
    await vm.stop();
    await vm.cont();
    const [first, second] = [join(scratch, 'real-a'), join(scratch, 'real-b')];
    const { changedPages } = await vm.snapshot(first);
    expect(changedPages).toBeGreaterThan(1000);
    await vm.cont();
    expect((await vm.snapshot(second, { base: first })).changedPages).toBeLessThan(changedPages);
    await vm.kill();
    const again = await driver.restore(machine(join(scratch, 'real2')), second, { memory: 'private' });
    expect(await again.state()).toBe('stopped');
    await again.cont();
    expect(await again.state()).toBe('running');
    await again.kill();
    expectNothingLeft(join(scratch, 'real2'));
  });
});
