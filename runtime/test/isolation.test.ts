/**
 * One suite for every backend that is here: what a sandbox sees, what it may, how it ends. What crun passes our own launcher has
 * to pass. The last part holds what both show against each other.
 */
import { execFileSync, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { chooseBackend, RUNTIME_NAMES } from '../backend/choose-backend.ts';
import { firstProcessOf } from '../backend/first-process.ts';
import { listSandboxes } from '../index.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import { busybox, canRun, NOTHING, type Ran, Site } from './sandbox-fixture.ts';

const backends = RUNTIME_NAMES.filter((name) => {
  const present = name === 'dsec' ? findAgent() !== undefined : canFind(name);
  if (!present) console.log(`skipped: no ${name} here`);
  return present;
});

function canFind(name: string): boolean {
  return ['/usr/bin', '/usr/sbin', '/usr/local/bin', '/usr/local/sbin'].some((folder) =>
    fs.existsSync(join(folder, name)),
  );
}

let site: Site;
let count = 0;
let base: Image;
const usable = canRun();
beforeAll(async () => {
  if (!usable) return;
  site = await new Site().open();
  const extra = (folder: string) => {
    busybox(folder);
    for (const name of [
      'mknod',
      'readlink',
      'setsid',
      'ps',
      'head',
      'nsenter',
      'sort',
      'cut',
      'find',
      'sync',
      'umount',
    ]) {
      fs.symlinkSync('busybox', join(folder, 'bin', name));
    }
    fs.mkdirSync(join(folder, 'setuid'));
    fs.copyFileSync('/bin/busybox', join(folder, 'setuid/busybox'));
    fs.chmodSync(join(folder, 'setuid/busybox'), 0o4755);
    fs.writeFileSync(join(folder, 'bin/exe-script'), '#!/proc/self/exe\n', { mode: 0o755 });
    fs.mkdirSync(join(folder, 'secret'), { mode: 0o700 });
  };
  base = await site.image('iso:1', [extra], { Env: ['PATH=/bin'] });
});
afterAll(() => site?.remove());

const ways = [
  ...backends.map((name) => [name, 'private'] as const),
  ...backends.slice(0, 1).map((name) => [name, 'host'] as const),
];

describe.skipIf(!usable).each(ways)('isolation by %s, user namespace: %s', (name, mode) => {
  const run = (command: readonly string[], options: Parameters<Site['run']>[2] = {}): Promise<Ran> => {
    const userns = mode === 'host' ? mode : undefined;
    return site.run(base, command, { backend: chooseBackend(site.folders.runDir, name), userns, ...options });
  };
  const sh = (script: string, options: Parameters<Site['run']>[2] = {}) => run(['sh', '-c', script], options);
  const out = async (script: string, options: Parameters<Site['run']>[2] = {}) =>
    (await sh(script, options)).stdout.toString();

  it('holds no descriptor but the standard ones', async () => {
    expect((await out('ls /proc/1/fd; true', { user: 'agent' })).trim().split(/\s+/)).toEqual(['0', '1', '2']);
    expect((await out('ls /proc/self/fd | wc -l')).trim()).toBe('4');
  });

  it('shows the command as process 1, in a session of its own, with nothing of the host in it', async () => {
    const ran = await run(['cat', '/proc/1/cmdline', '/proc/1/environ'], { env: ['ONLY=this'] });
    const [command, ...rest] = ran.stdout.toString().split('\0');
    expect(command).toBe('cat');
    expect(
      rest
        .filter((part) => part.includes('='))
        .map((part) => part.split('=')[0])
        .sort(),
    ).toEqual(['HOME', 'HOSTNAME', 'ONLY', 'PATH', 'container'].sort());
    expect((await out('cut -d" " -f4-6 /proc/1/stat')).trim()).toBe('0 1 1');
    expect((await out('readlink /proc/1/exe')).trim()).toBe('/bin/busybox');
  });

  it('sees its own processes alone', async () => {
    const pids = (await out('for d in /proc/[0-9]*; do echo $d; done')).trim().split('\n');
    expect(pids).toEqual(['/proc/1']);
  });

  it('has namespaces of its own', async () => {
    const inside = (await out('for n in pid mnt ipc uts net; do readlink /proc/self/ns/$n; done')).trim().split('\n');
    const outside = ['pid', 'mnt', 'ipc', 'uts', 'net'].map((type) => fs.readlinkSync(`/proc/self/ns/${type}`));
    expect(inside.filter((id) => outside.includes(id))).toEqual([]);
    expect((await out('readlink /proc/self/ns/net', { network: 'host' })).trim()).toBe(outside[4]);
  });

  it('is in a control group of its own in every hierarchy by which it is limited, counted or stopped, and below ours in all', async () => {
    const rows = (await out('cat /proc/self/cgroup')).trim().split('\n');
    const controlled = rows.filter((row) => !row.startsWith('0::') || rows.length === 1);
    // Our own launcher has one for all sandboxes in these two.
    const [shared, own] = [true, false].map((is) => controlled.filter((row) => /:(cpuset|name=\w+):/.test(row) === is));
    expect(own!.length).toBeGreaterThan(0);
    expect(own!.filter((row) => !/:\/dsec\/[a-z0-9._-]+$/.test(row))).toEqual([]);
    expect(shared!.filter((row) => !(name === 'dsec' ? /:\/dsec$/ : /:\/dsec\/[a-z0-9._-]+$/).test(row))).toEqual([]);
  });

  it('has fourteen capabilities as root, and none as another user', async () => {
    const caps = async (user: string) =>
      Object.fromEntries(
        [...(await out('cat /proc/self/status', { user })).matchAll(/^(Cap\w+|NoNewPrivs|Seccomp):\s*(\w+)$/gm)].map(
          ([, field, value]) => [field, value],
        ),
      );
    const fourteen = '00000000a80425fb';
    const none = '0000000000000000';
    const common = { CapInh: none, CapBnd: fourteen, CapAmb: none, NoNewPrivs: '1', Seccomp: '2' };
    expect(await caps('root')).toEqual({ ...common, CapPrm: fourteen, CapEff: fourteen });
    expect(await caps('agent')).toEqual({ ...common, CapPrm: none, CapEff: none });
  });

  it('gains nothing by a setuid program', async () => {
    const ids = await out('/setuid/busybox grep Uid /proc/self/status', { user: 'agent' });
    expect(ids.trim().split(/\s+/)).toEqual(['Uid:', '1000', '1000', '1000', '1000']);
  });

  it('has the user’s groups', async () => {
    expect(await out('id -u; id -g; id -G', { user: 'agent' })).toBe('1000\n1001\n1001 2000 2001\n');
    expect(await out('id -u; id -g; id -G', { user: '5:6' })).toBe('5\n6\n6\n');
  });

  it('shows nothing of kernel memory, logs and hardware', async () => {
    const masked =
      '/proc/kcore /proc/kmsg /proc/keys /proc/timer_list /proc/interrupts /proc/kpagecgroup /proc/kpageflags';
    expect(await out(`for f in ${masked}; do [ -e $f ] && head -c 10 $f; done; true`)).toBe('');
    expect(
      await out('for d in /proc/acpi /proc/scsi /sys/firmware /sys/kernel/debug; do [ -d $d ] && ls -A $d; done; true'),
    ).toBe('');
    const errors = (await sh('umount /proc/kcore; rm /proc/kcore; echo x > /proc/timer_list; mount -t proc p /mnt'))
      .stderr;
    expect(errors).not.toBe('');
    expect(await out('[ -e /proc/kcore ] && head -c 10 /proc/kcore; true')).toBe('');
  });

  it.each([
    'echo 1 > /proc/sys/kernel/hostname',
    'echo b > /proc/sysrq-trigger',
    'echo 1 > /sys/kernel/uevent_helper',
    'mkdir /sys/fs/cgroup/x',
    'mount -t tmpfs x /root',
    'mount -o remount,rw /sys',
    'unshare -n true',
    'nsenter -t 1 -m true',
    'hostname other',
  ])('refuses: %s', async (script) => {
    const { exitCode, stderr } = await sh(`mkdir -p /root; ${script}`);
    expect(exitCode).not.toBe(0);
    expect(stderr).toMatch(/denied|not permitted|read-only|nonexistent|no such file/i);
  });

  it('opens harmless devices alone, and makes none in a user namespace', async () => {
    expect(await out('for d in null zero full random urandom tty ptmx; do [ -e /dev/$d ] && echo $d; done')).toBe(
      'null\nzero\nfull\nrandom\nurandom\ntty\nptmx\n',
    );
    expect(await out('mknod /n c 1 3 2>/dev/null; echo x > /n && echo wrote; head -c 4 /dev/zero | wc -c')).toBe(
      'wrote\n4\n',
    );
    const { stderr } = await sh(
      'mknod /fuse c 10 229; mknod /disk b 254 0; mknod /mem c 1 1; cat /fuse; cat /disk; cat /mem',
    );
    expect(stderr.match(/not permitted/g)?.length).toBe(3);
  });

  it('has a root, devices and mounts that forbid what they should', async () => {
    const rows = (await out('cat /proc/self/mountinfo'))
      .trim()
      .split('\n')
      .map((line) => line.split(' '));
    const optionsOf = (path: string) => rows.find((row) => row[4] === path)?.[5]?.split(',') ?? [];
    expect(optionsOf('/proc')).toEqual(expect.arrayContaining(['nosuid', 'nodev', 'noexec']));
    expect(optionsOf('/sys')).toEqual(expect.arrayContaining(['ro', 'nosuid', 'nodev', 'noexec']));
    expect(optionsOf('/dev')).toEqual(expect.arrayContaining(['nosuid', 'noexec']));
    expect(optionsOf('/dev/shm')).toEqual(expect.arrayContaining(['nosuid', 'nodev', 'noexec']));
    for (const path of ['/proc/sys', '/proc/bus', '/proc/irq']) expect(optionsOf(path)).toContain('ro');
    // Nothing of the host's tree.
    expect(rows.filter((row) => !/^\/(proc|sys|dev)?(\/|$)/.test(row[4]!))).toEqual([]);
  });

  it('has loopback alone, and it is up', async () => {
    expect(
      (await out('ls /sys/class/net; cat /sys/class/net/lo/operstate; cat /sys/class/net/lo/flags'))
        .split('\n')
        .slice(0, 3),
    ).toEqual(['lo', 'unknown', '0x9']);
  });

  it('leads nowhere by a working directory in /proc', async () => {
    for (const fd of [3, 5, 7, 9, 11]) {
      const done = await sh('pwd; ls', { workdir: `/proc/self/fd/${fd}` }).catch((error: Error) => error);
      if (done instanceof Error) continue;
      // A folder of that name in the sandbox's own /proc cannot be: then it must not be the host's.
      expect([done.exitCode !== 0 || done.stdout.toString()]).not.toEqual([expect.stringContaining('package.json')]);
    }
  });

  it('never gets hold of the launcher’s own program', async () => {
    for (const command of [['/proc/self/exe', 'version'], ['/bin/exe-script']]) {
      const done = await run(command).catch((error: { exit?: number }) => error.exit);
      expect(typeof done === 'number' ? done : (done as Ran).exitCode).not.toBe(0);
    }
  });

  it('is not deceived by links in place of /dev, /proc and /sys', async () => {
    const at = (name: string, target: string, more: (folder: string) => void = () => {}) =>
      site.image(`links${count++}:1`, [
        (folder) => {
          busybox(folder);
          fs.symlinkSync(target, join(folder, name));
          more(folder);
        },
      ]);
    const secrets = ['cat', '/proc/keys', '/proc/interrupts', '/proc/timer_list'];
    // The last: /dev/null, which hides those, would be the image's own.
    for (const image of [
      await at('proc', '/'),
      await at('sys', 'etc'),
      await at('dev', '/proc/self/root'),
      await at('dev', '/proc/self/cwd', (folder) => {
        fs.symlinkSync('/proc/keys', join(folder, 'null'));
        fs.mkdirSync(join(folder, 'pts'));
      }),
    ]) {
      const backend = chooseBackend(site.folders.runDir, name);
      const done = await site.run(image, secrets, { backend }).catch((error: { exit?: number }) => error.exit);
      if (typeof done === 'number') expect(done).toBe(125);
      else expect(done).toMatchObject({ stdout: Buffer.alloc(0) });
    }
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('leaves a named pipe of the host to its owner', async () => {
    if (name !== 'dsec') return;
    const pipe = join(site.root, `named-${mode}`);
    execFileSync('mkfifo', [pipe]);
    const run = site.spawn({ image: 'iso:1', command: ['echo', 'x'], user: 'agent', runtime: name }, {}, (argv) => [
      ...['sh', '-c', `cat ${pipe} > /dev/null & exec "$@" > ${pipe}`, 'sh'],
      ...argv,
    ]);
    expect(await run.finished).toEqual({ code: 0, signal: null });
    expect(fs.statSync(pipe)).toMatchObject({ uid: 0, gid: 0 });
  });

  it('starts in a folder that root may enter and the user may not', async () => {
    expect(await out('pwd', { user: 'agent', workdir: '/secret' })).toBe('/secret\n');
  });

  it('ends with all that it started, whatever that did to hide', async () => {
    const ran = await sh('(setsid sleep 1000 &); (setsid sh -c "trap \'\' TERM HUP; sleep 1000" &); echo started');
    expect([ran.exitCode, ran.stdout.toString()]).toEqual([0, 'started\n']);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('tells an end by SIGKILL from outside', async () => {
    const ran = await sh('echo ready; exec sleep 1000', {
      stdio: {
        onStdout: () => {
          const [record] = listSandboxes(site.folders);
          process.kill(firstProcessOf(sandboxFolders(site.folders, record!.name).bundle)!.pid, 'SIGKILL');
        },
      },
    });
    expect(ran.exitCode).toBe(137);
    if (name === 'dsec') expect(ran.signal).toBe('SIGKILL');
    expect((await sh('exit 137')).signal).toBeUndefined();
  });

  it('tells what the kernel killed for want of memory', async () => {
    const limit = (id: string) => {
      const files = cgroupsOf(id).flatMap((group) => [join(group, 'memory.limit_in_bytes'), join(group, 'memory.max')]);
      const file = files.find((path) => fs.existsSync(path));
      if (file !== undefined) fs.writeFileSync(file, '33554432');
      return file !== undefined;
    };
    let limited = false;
    const gate = new Readable({ read() {} });
    const ran = await sh('echo ready; read go; [ $go = go ] || exit 0; x=0123456789abcdef; while :; do x=$x$x; done', {
      stdio: {
        stdin: gate,
        onStdout: () => {
          limited = limit(listSandboxes(site.folders)[0]!.id);
          gate.push(limited ? 'go\n' : 'no\n');
          gate.push(null);
        },
      },
    });
    if (!limited) return console.log('skipped: no memory controller');
    expect(ran.exitCode).toBe(137);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('gives a terminal of its own', async () => {
    const order = JSON.stringify({
      image: 'iso:1',
      command: [
        'sh',
        '-c',
        'tty; stty size; [ -t 0 ] && [ -t 1 ] && echo both; ls -l /dev/console | cut -c1; id -u; exit 7',
      ],
      terminal: true,
      user: 'agent',
      runtime: name,
      storeUrl: site.storeUrl,
      folders: site.folders,
    });
    const child = new URL('./sandbox-child.ts', import.meta.url).pathname;
    const line = `stty rows 33 cols 77; exec ${process.execPath} --import tsx ${child} '${order.replaceAll("'", "'\\''")}'`;
    // Its input stays open: script ends what it runs when that ends.
    const script = spawn('script', ['-qec', line, '/dev/null'], { stdio: ['pipe', 'pipe', 'inherit'] });
    let text = '';
    script.stdout.on('data', (bytes) => {
      text += bytes;
    });
    const status = await new Promise((resolve) => script.once('close', resolve));
    expect(text.replaceAll('\r', '')).toContain('/dev/pts/0\n33 77\nboth\nc\n1000\n');
    expect(status).toBe(7);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('runs many at once', async () => {
    const outputs = await Promise.all(Array.from({ length: 8 }, (_, i) => out(`echo ${i}`)));
    expect(outputs).toEqual(Array.from({ length: 8 }, (_, i) => `${i}\n`));
    expect(site.leftovers()).toEqual(NOTHING);
  });
});

describe.skipIf(!usable || !backends.includes('dsec') || !backends.includes('crun'))('our launcher beside crun', () => {
  const facts = async (name: string) => {
    const script = [
      'cut -d" " -f5,9- /proc/self/mountinfo | sort',
      'grep -E "^(Cap|NoNew|Seccomp:|Groups|Uid|Gid|Umask|SigBlk|SigIgn|SigCgt|NSpid|NSpgid|NSsid)" /proc/self/status',
      'grep -v "Max pending" /proc/self/limits',
      'find /dev | sort',
      'stat -c "%n %F %a %u %g %t %T" /dev/* /dev /proc /sys /dev/shm /dev/mqueue /dev/pts',
      'cat /proc/1/oom_score_adj /proc/self/coredump_filter /proc/self/timerslack_ns /proc/sys/kernel/hostname',
      'for f in /proc/self/cgroup; do sed -e "s,/dsec/.*,/dsec/ID," $f; done',
      'env | sort; pwd; ls -A / /root 2>&1',
    ].join('; ');
    const ran = await site.run(
      base,
      ['sh', '-c', script.replace('sed -e "s,/dsec/.*,/dsec/ID," $f', 'cut -d/ -f1,2 $f')],
      {
        backend: chooseBackend(site.folders.runDir, name),
        name: 'same',
      },
    );
    return normal(ran.stdout.toString());
  };
  /** What may differ: ids, where a mask comes from, and that /dev/shm is a part of /dev; the stricter options are held above. Each has a range of users of its own. */
  const normal = (text: string) =>
    text
      .replace(/([ug]id=)(\d+)/g, (_, name: string, id: string) => `${name}${Number(id) % 65_536}`)
      .split('\n')
      .filter((line) => !/^\/ /.test(line))
      .map((line) => (/^(\/proc\/|\/sys|\/dev\/shm (shm|tmpfs) )/.test(line) ? line.split(' ')[0]! : line));

  it('shows the same in every respect', async () => {
    expect(await facts('dsec')).toEqual(await facts('crun'));
  });
});
