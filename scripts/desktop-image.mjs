/**
 * Makes the disk of a small graphical Linux, of Debian's packages: kernel, busybox, an X server and a terminal. For trying full machines, and for
 * their tests. Nothing is installed: packages are fetched by apt and unpacked, the disk is put together without mounts and without root.
 *
 *     node scripts/desktop-image.mjs desktop.raw [--kernel FOLDER]
 *
 * It boots by BIOS and by UEFI, has a shell on the serial console and in the X terminal (no password), and switches itself off at the power button.
 * FOLDER holds boot/vmlinuz-* and lib/modules, as `dsec vm kernel` leaves it (default: its, else that of the lab).
 */
import { execFileSync, spawnSync } from 'node:child_process';
import {
  chmodSync,
  closeSync,
  copyFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  readSync,
  renameSync,
  rmSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { homedir, tmpdir } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';
import { argv, env, exit } from 'node:process';
import { fileURLToPath } from 'node:url';

/** What it is made with, unpacked and run from where it is. */
const TOOLS = ['syslinux', 'syslinux-common', 'mtools', 'dosfstools', 'systemd-boot-efi', 'cpio'];
const SYSTEM = [
  ...['busybox-static', 'xserver-xorg-core', 'xserver-xorg-video-fbdev', 'xserver-xorg-input-evdev', 'x11-xkb-utils'],
  ...['xkb-data', 'xterm', 'fonts-dejavu-core', 'fontconfig-config', 'libc6', 'libaudit1', 'libcap-ng0', 'libbsd0'],
  ...['libmd0', 'libdrm2', 'libevdev2', 'libmtdev1', 'libfontconfig1', 'libfontenc1', 'libfreetype6', 'libbrotli1'],
  ...['libpng16-16', 'libbz2-1.0', 'zlib1g', 'libexpat1', 'libuuid1', 'libgcrypt20', 'libgpg-error0', 'libpciaccess0'],
  ...['libpixman-1-0', 'libselinux1', 'libpcre2-8-0', 'libsystemd0', 'libcap2', 'liblz4-1', 'liblzma5', 'libzstd1'],
  ...[
    'libdbus-1-3',
    'libudev1',
    'libunwind8',
    'libutempter0',
    'libtinfo6',
    'libx11-6',
    'libx11-data',
    'libxau6',
    'libxaw7',
  ],
  ...[
    'libxcb1',
    'libxcvt0',
    'libxdmcp6',
    'libxext6',
    'libxfont2',
    'libxft2',
    'libxinerama1',
    'libxkbfile1',
    'libxmu6',
    'libxshmfence1',
  ],
  ...['libxpm4', 'libxrender1', 'libxt6', 'libice6', 'libsm6', 'libstdc++6', 'libgcc-s1'],
  ...['qemu-guest-agent', 'libglib2.0-0', 'libffi8', 'libmount1', 'libblkid1', 'libnuma1', 'liburing2'],
  // Of commands as another user.
  'util-linux',
  // The clipboard, and a program that copies and pastes.
  ...[
    'spice-vdagent',
    'xclip',
    'libasound2',
    'libatk-bridge2.0-0',
    'libatk1.0-0',
    'libatspi2.0-0',
    'libcairo-gobject2',
  ],
  ...['libcairo2', 'libdatrie1', 'libepoxy0', 'libfribidi0', 'libgdk-pixbuf-2.0-0', 'libgraphite2-3', 'libgtk-3-0'],
  ...['libharfbuzz0b', 'libjpeg62-turbo', 'libpango-1.0-0', 'libpangocairo-1.0-0', 'libpangoft2-1.0-0', 'libthai0'],
  ...['libwayland-client0', 'libwayland-cursor0', 'libwayland-egl1', 'libxcb-render0', 'libxcb-shm0', 'libxcomposite1'],
  ...['libxcursor1', 'libxdamage1', 'libxfixes3', 'libxi6', 'libxkbcommon0', 'libxrandr2'],
];
/** Before the root: what it lies on. After it: what the X server, the power button, the guest agent and the network need. */
const FIRST = ['virtio_pci', 'virtio_blk', 'ext4'];
const LATER = [
  ...['virtio_gpu', 'xhci_pci', 'usbhid', 'hid_generic', 'evdev', 'button'],
  ...['virtio_console', 'virtio_net', 'af_packet'],
];
const MIB = 1024 * 1024;
const BOOT_MIB = 64;
const ROOT_MIB = 192;
const LINE = 'root=/dev/vda2 console=tty0 console=ttyS0 quiet mitigations=off nokaslr panic=10';

/** @param {string} path Of the disk. @param {{ kernel?: string, log?: (text: string) => void }} [options] */
export function makeDesktopImage(path, { kernel = kernelFolder(), log = () => {} } = {}) {
  const work = mkdtempSync(join(tmpdir(), 'dsec-desktop-'));
  try {
    log('fetching packages');
    const tools = unpack(TOOLS, work, 'tools');
    const root = unpack(SYSTEM, work, 'root');
    const version = readdirSync(join(kernel, 'lib/modules'))[0] ?? '';
    log('putting the system together');
    prune(root);
    const later = modules(kernel, version, LATER, join(root, 'modules'));
    writeSystem(root, later);
    const initrd = makeInitrd(work, root, tools, kernel, version);
    log('making the disk');
    const rootDisk = join(work, 'root.ext4');
    writeFileSync(rootDisk, '');
    truncateSync(rootDisk, ROOT_MIB * MIB);
    run('mke2fs', ['-q', '-t', 'ext4', '-O', '^has_journal', '-E', 'root_owner=0:0', '-d', root, rootDisk]);
    const bootDisk = makeBoot(work, tools, join(kernel, 'boot', `vmlinuz-${version}`), initrd);
    assemble(`${path}.part`, join(tools, 'usr/lib/syslinux/mbr/mbr.bin'), bootDisk, rootDisk);
    renameSync(`${path}.part`, path);
  } finally {
    rmSync(work, { recursive: true, force: true });
    rmSync(`${path}.part`, { force: true });
  }
}

function kernelFolder() {
  const places = [
    join(env.DSEC_STATE ?? '/var/lib/dsec', 'vm/kernels'),
    join(env.DSEC_LAB_CACHE ?? join(homedir(), '.cache/dsec/lab'), 'kernels'),
  ];
  for (const place of places) {
    const found = existsSync(place) ? readdirSync(place).find((name) => name.startsWith('6.12.')) : undefined;
    if (found !== undefined) return join(place, found);
  }
  throw new Error('no kernel for it: dsec vm kernel');
}

/** @param {string} program @param {string[]} args @param {{ cwd?: string, env?: NodeJS.ProcessEnv, input?: Buffer }} [options] */
function run(program, args, options = {}) {
  return execFileSync(program, args, { stdio: ['pipe', 'pipe', 'pipe'], maxBuffer: 2 ** 29, ...options });
}

/** @param {string[]} packages @param {string} work @param {string} name */
function unpack(packages, work, name) {
  const archives = join(work, `${name}-packages`);
  const tree = join(work, name);
  for (const folder of [archives, tree]) mkdirSync(folder);
  run('apt-get', ['download', '-q', ...packages], { cwd: archives });
  for (const archive of readdirSync(archives)) run('dpkg-deb', ['-x', join(archives, archive), tree]);
  // As an installed system has it.
  for (const folder of ['bin', 'sbin', 'lib', 'lib64']) {
    const from = join(tree, folder);
    if (existsSync(from)) {
      cpSync(from, join(tree, 'usr', folder), { recursive: true, verbatimSymlinks: true });
      rmSync(from, { recursive: true });
    }
    mkdirSync(join(tree, 'usr', folder), { recursive: true });
    symlinkSync(`usr/${folder}`, from);
  }
  return tree;
}

/** @param {string} root */
function prune(root) {
  for (const path of [
    'usr/share/doc',
    'usr/share/man',
    'usr/share/locale',
    'usr/share/lintian',
    'usr/share/bug',
    'usr/lib/x86_64-linux-gnu/gconv',
  ]) {
    rmSync(join(root, path), { recursive: true, force: true });
  }
}

/** Into `into`; their names in the order to load them. @param {string} base @param {string} version @param {string[]} wanted @param {string} into */
function modules(base, version, wanted, into) {
  mkdirSync(into, { recursive: true });
  /** @type {Set<string>} */
  const order = new Set();
  for (const module of wanted) {
    const { stdout } = spawnSync('modprobe', ['-d', base, '-S', version, '--show-depends', module], {
      encoding: 'utf8',
      env: { ...env, PATH: `${env.PATH}:/usr/sbin:/sbin` },
    });
    for (const line of (stdout ?? '').split('\n')) {
      const path = /^insmod (\S+)/.exec(line)?.[1];
      if (path === undefined) continue;
      const name = basename(path).replace(/\.xz$/, '');
      if (order.has(name)) continue;
      order.add(name);
      writeFileSync(join(into, name), path.endsWith('.xz') ? run('xz', ['-dc', path]) : readFileSync(path));
    }
  }
  return [...order];
}

/** @param {string} path @param {string} text */
function program(path, text) {
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, text);
  chmodSync(path, 0o755);
}

/** @param {string} root @param {string[]} later Modules. */
function writeSystem(root, later) {
  for (const folder of ['dev', 'proc', 'sys', 'tmp', 'root', 'run', 'var/log', 'var/lib/xkb', 'etc', 'home/user'])
    mkdirSync(join(root, folder), { recursive: true });
  writeFileSync(join(root, 'etc/passwd'), 'root::0:0:root:/root:/bin/sh\nuser::1000:1000:user:/home/user:/bin/sh\n');
  writeFileSync(join(root, 'etc/group'), 'root:x:0:\ntty:x:5:user\nutmp:x:43:\nuser:x:1000:\n');
  writeFileSync(join(root, 'etc/hostname'), 'desktop\n');
  for (const applet of [
    'sh',
    'mount',
    'insmod',
    'ln',
    'grep',
    'sed',
    'cat',
    'poweroff',
    'sleep',
    'stty',
    'setsid',
    'cttyhack',
    'acpid',
    'hostname',
    'ls',
    'cp',
    'rm',
    'mkdir',
    'dd',
    'sha256sum',
    'head',
    'uname',
    'clear',
    'sync',
    'init',
    'date',
    'touch',
    'ps',
    'kill',
    'tr',
    'umount',
    'dmesg',
    ...['ip', 'ifconfig', 'route', 'udhcpc', 'tail', 'nc', 'id', 'env', 'printf', 'true', 'false', 'pwd'],
  ]) {
    const path = join(root, 'usr/bin', applet);
    if (!existsSync(path)) symlinkSync('/bin/busybox', path);
  }
  program(
    join(root, 'etc/init'),
    `#!/bin/sh
export PATH=/usr/bin:/usr/sbin HOME=/root TERM=xterm
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
hostname desktop
for module in ${later.join(' ')}; do insmod /modules/$module; done
acpid -f -c /etc/acpi &
ip link set lo up
[ -e /sys/class/net/eth0 ] && ip link set eth0 up && udhcpc -i eth0 -s /etc/udhcpc -t 30 -b &
# Ports of agents by their names: there is no udev.
port() { grep -ls "$1" /sys/class/virtio-ports/*/name | sed 's|.*/\\(vport[^/]*\\)/name|/dev/\\1|'; }
agent=$(port org.qemu.guest_agent.0)
[ -n "$agent" ] && mkdir -p /run /var/run && while :; do qemu-ga -m virtio-serial -p "$agent" -t /run; sleep 1; done &
(while :; do setsid sh -c 'exec sh </dev/ttyS0 >/dev/ttyS0 2>&1'; done) &
# Devices by what they are: there is no udev.
event() { sed -n "/Name=\\"$1\\"/,/^$/s/.*\\(event[0-9]*\\).*/\\1/p" /proc/bus/input/devices; }
until [ -e /dev/fb0 ] && [ -n "$(event 'AT Translated Set 2 keyboard')" ] && [ -n "$(event 'QEMU QEMU USB Tablet')" ]; do sleep 0.1; done
ln -s $(event 'AT Translated Set 2 keyboard') /dev/input/keyboard
ln -s $(event 'QEMU QEMU USB Tablet') /dev/input/tablet
Xorg :0 vt1 -novtswitch -nolisten tcp -noreset -config /etc/xorg.conf -logfile /tmp/xorg.log >/tmp/xorg.out 2>&1 &
until [ -e /tmp/.X11-unix/X0 ]; do sleep 0.1; done
export DISPLAY=:0
clipboard=$(port com.redhat.spice.0)
if [ -n "$clipboard" ]; then
  # No mouse of its own, and no sessions: there is one.
  while :; do spice-vdagentd -x -X -f -u /dev/null -s "$clipboard" -S /run/clipboard; sleep 1; done &
  while :; do [ -S /run/clipboard ] && spice-vdagent -x -s "$clipboard" -S /run/clipboard; sleep 1; done &
fi
xterm -fa 'DejaVu Sans Mono' -fs 12 -geometry 80x24+40+40 -bg navy -fg white -cr yellow -e sh -c 'echo desktop-is-ready >/dev/ttyS0; cd /root; exec sh' &
while :; do wait; sleep 1; done
`,
  );
  program(
    join(root, 'etc/udhcpc'),
    `#!/bin/sh
case $1 in
bound | renew)
  ifconfig $interface $ip netmask $subnet mtu \${mtu:-1500}
  route add default gw $router dev $interface
  for server in $dns; do echo nameserver $server; done >/etc/resolv.conf
  ;;
esac
`,
  );
  program(join(root, 'etc/acpi/PWRF/00000080'), '#!/bin/sh\nsync\npoweroff -f\n');
  writeFileSync(
    join(root, 'etc/xorg.conf'),
    `Section "ServerFlags"
  Option "AutoAddDevices" "false"
  Option "BlankTime" "0"
EndSection
Section "Module"
  Disable "glx"
  Disable "dri2"
EndSection
Section "Device"
  Identifier "screen"
  Driver "fbdev"
EndSection
Section "InputDevice"
  Identifier "keyboard"
  Driver "evdev"
  Option "Device" "/dev/input/keyboard"
EndSection
Section "InputDevice"
  Identifier "tablet"
  Driver "evdev"
  Option "Device" "/dev/input/tablet"
EndSection
Section "ServerLayout"
  Identifier "all"
  InputDevice "keyboard" "CoreKeyboard"
  InputDevice "tablet" "CorePointer"
EndSection
`,
  );
}

/** @param {string} work @param {string} root @param {string} tools @param {string} kernel @param {string} version */
function makeInitrd(work, root, tools, kernel, version) {
  const tree = join(work, 'initrd');
  for (const folder of ['bin', 'dev', 'proc', 'root']) mkdirSync(join(tree, folder), { recursive: true });
  copyFileSync(join(root, 'usr/bin/busybox'), join(tree, 'bin/busybox'));
  symlinkSync('busybox', join(tree, 'bin/sh'));
  const order = modules(kernel, version, FIRST, join(tree, 'modules'));
  program(
    join(tree, 'init'),
    `#!/bin/sh
busybox() { /bin/busybox "$@"; }
busybox mount -t devtmpfs dev /dev
for module in ${order.join(' ')}; do busybox insmod /modules/$module; done
until [ -b /dev/vda2 ]; do busybox sleep 0.05; done
busybox mount -t ext4 /dev/vda2 /root
busybox umount /dev
exec /bin/busybox switch_root /root /etc/init
`,
  );
  const names = run('find', ['.'], { cwd: tree });
  const path = join(work, 'initrd.img');
  writeFileSync(
    path,
    run(join(tools, 'usr/bin/cpio'), ['-o', '-H', 'newc', '--quiet', '--owner=0:0'], { cwd: tree, input: names }),
  );
  return path;
}

/** @param {string} work @param {string} tools @param {string} kernel @param {string} initrd */
function makeBoot(work, tools, kernel, initrd) {
  const disk = join(work, 'boot.fat');
  writeFileSync(disk, '');
  truncateSync(disk, BOOT_MIB * MIB);
  run(join(tools, 'usr/sbin/mkfs.vfat'), ['-F', '32', '-n', 'BOOT', '-h', '2048', disk]);
  const files = join(work, 'boot');
  for (const folder of ['EFI/BOOT', 'loader/entries']) mkdirSync(join(files, folder), { recursive: true });
  copyFileSync(join(tools, 'usr/lib/systemd/boot/efi/systemd-bootx64.efi'), join(files, 'EFI/BOOT/BOOTX64.EFI'));
  writeFileSync(join(files, 'loader/loader.conf'), 'timeout 0\ndefault linux.conf\n');
  writeFileSync(
    join(files, 'loader/entries/linux.conf'),
    `title Linux\nlinux /vmlinuz\ninitrd /initrd.img\noptions ${LINE}\n`,
  );
  writeFileSync(
    join(files, 'syslinux.cfg'),
    `PROMPT 0\nDEFAULT linux\nLABEL linux\n LINUX /vmlinuz\n INITRD /initrd.img\n APPEND ${LINE}\n`,
  );
  copyFileSync(kernel, join(files, 'vmlinuz'));
  copyFileSync(initrd, join(files, 'initrd.img'));
  // Its helper programs are beside it.
  const withTools = { env: { ...env, PATH: `${join(tools, 'usr/bin')}:${env.PATH}`, MTOOLS_SKIP_CHECK: '1' } };
  run('mcopy', ['-s', '-i', disk, ...readdirSync(files).map((name) => join(files, name)), '::/'], withTools);
  run('syslinux', ['--install', disk], withTools);
  return disk;
}

/** @param {string} path @param {string} mbr @param {string} boot @param {string} root */
function assemble(path, mbr, boot, root) {
  const sector = Buffer.alloc(512);
  readFileSync(mbr).copy(sector, 0, 0, 440);
  const parts = [
    { type: 0xef, start: 2048, sectors: (BOOT_MIB * MIB) / 512, active: 0x80 },
    { type: 0x83, start: 2048 + (BOOT_MIB * MIB) / 512, sectors: (ROOT_MIB * MIB) / 512, active: 0 },
  ];
  for (const [at, { type, start, sectors, active }] of parts.entries()) {
    const entry = 446 + 16 * at;
    sector[entry] = active;
    sector.fill(0xff, entry + 1, entry + 8);
    sector[entry + 4] = type;
    sector.writeUInt32LE(start, entry + 8);
    sector.writeUInt32LE(sectors, entry + 12);
  }
  sector.writeUInt16LE(0xaa55, 510);
  const out = openSync(path, 'w');
  try {
    writeSync(out, sector, 0, 512, 0);
    for (const [at, file] of [boot, root].entries()) copySparse(file, out, (parts[at]?.start ?? 0) * 512);
  } finally {
    closeSync(out);
  }
  truncateSync(path, 2048 * 512 + (BOOT_MIB + ROOT_MIB) * MIB);
}

/** @param {string} from @param {number} out @param {number} offset */
function copySparse(from, out, offset) {
  const buffer = Buffer.alloc(MIB);
  const zeros = Buffer.alloc(MIB);
  const input = openSync(from, 'r');
  try {
    for (let at = 0; ; ) {
      const count = readSync(input, buffer, 0, MIB, at);
      if (count === 0) return;
      if (buffer.compare(zeros, 0, count, 0, count) !== 0) writeSync(out, buffer, 0, count, offset + at);
      at += count;
    }
  } finally {
    closeSync(input);
  }
}

if (argv[1] === fileURLToPath(import.meta.url)) {
  const [path, flag, kernel] = argv.slice(2);
  if (path === undefined || (flag !== undefined && (flag !== '--kernel' || kernel === undefined))) {
    console.error('usage: node scripts/desktop-image.mjs DISK [--kernel FOLDER]');
    exit(2);
  }
  makeDesktopImage(resolve(path), { log: console.error, ...(kernel === undefined ? {} : { kernel: resolve(kernel) }) });
}
