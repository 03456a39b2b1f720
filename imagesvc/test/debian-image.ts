/**
 * A real image, made by the tools that make real images: Debian's own files as its first layer (debootstrap; where that does not
 * work, packages from apt unpacked by dpkg), and layers that umoci makes of what was changed on top, in every way that a
 * container changes things.
 */
import { execFileSync, spawnSync } from 'node:child_process';
import {
  chmodSync,
  chownSync,
  closeSync,
  copyFileSync,
  cpSync,
  existsSync,
  linkSync,
  lstatSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  realpathSync,
  renameSync,
  rmSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { lsetxattr } from '#linux';

const BOOTSTRAP_MS = 300_000;

/** What is missing for it, or undefined. */
export function missingForDebianImage(): string | undefined {
  if (process.getuid?.() !== 0) return 'it needs root';
  const tools = { umoci: 'umoci', skopeo: 'skopeo', 'docker-registry': 'docker-registry', dpkg: 'dpkg' };
  for (const [tool, apt] of Object.entries(tools)) {
    if (!has(tool)) return `${tool} is missing (apt-get install ${apt})`;
  }
  return undefined;
}

function has(tool: string): boolean {
  return spawnSync('sh', ['-c', `command -v ${tool}`]).status === 0;
}

/**
 * Writes a layout with the image `debian:4`, four layers, into `folder`.
 * @returns What the first layer was made of; undefined, with a line printed, when no mirror could be reached.
 */
export function makeDebianImage(folder: string): string | undefined {
  const layout = join(folder, 'layout');
  const bundle = join(folder, 'bundle');
  const rootfs = join(bundle, 'rootfs');
  const umoci = (...args: string[]) => execFileSync('umoci', args, { stdio: ['ignore', 'ignore', 'pipe'] });
  const repack = (version: number) =>
    umoci('repack', '--refresh-bundle', '--no-history', '--image', `${layout}:${version}`, bundle);
  umoci('init', '--layout', layout);
  umoci('new', '--image', `${layout}:0`);
  umoci('unpack', '--image', `${layout}:0`, bundle);
  const made = fillWithDebian(rootfs, folder);
  if (made === undefined) return undefined;
  repack(1);
  addToolkit(rootfs);
  repack(2);
  change(rootfs);
  repack(3);
  changeAgain(rootfs);
  repack(4);
  rmSync(bundle, { recursive: true });
  return made;
}

function fillWithDebian(rootfs: string, folder: string): string | undefined {
  if (has('debootstrap')) {
    const mirror = mirrorOfApt();
    if (mirror !== undefined) {
      const argv = ['--variant=minbase', mirror.codename, rootfs, mirror.site];
      const { status, stdout } = spawnSync('debootstrap', argv, { timeout: BOOTSTRAP_MS, encoding: 'utf8' });
      if (status === 0) {
        // Fetched packages: a hundred incompressible files that no image has.
        for (const name of readdirSync(join(rootfs, 'var/cache/apt/archives'))) {
          if (name.endsWith('.deb')) rmSync(join(rootfs, 'var/cache/apt/archives', name));
        }
        return `debootstrap ${argv.slice(0, 2).join(' ')}`;
      }
      console.log(`debootstrap ended with ${status}: ${stdout?.split('\n').slice(-3).join(' ')}`);
    }
  }
  return unpackPackages(rootfs, join(folder, 'packages'));
}

/** The first archive that apt is configured with. */
function mirrorOfApt(): { site: string; codename: string } | undefined {
  const { stdout } = spawnSync('apt-get', ['indextargets', '--format', '$(SITE) $(CODENAME)', 'Created-By: Packages'], {
    encoding: 'utf8',
  });
  const [site, codename] = (stdout ?? '').split('\n')[0]!.split(' ');
  return site && codename ? { site, codename } : undefined;
}

/** Without maintainer scripts: the files are real, the system would not boot. */
function unpackPackages(rootfs: string, folder: string): string | undefined {
  const format = ['-W', '-f', '$' + '{Package} $' + '{Priority}\\n'];
  const names = spawnSync('dpkg-query', format, { encoding: 'utf8' })
    .stdout.split('\n')
    .filter((line) => / (?:required|important)$/.test(line))
    .map((line) => line.split(' ')[0]!);
  mkdirSync(folder);
  const fetched = spawnSync('apt-get', ['-qq', 'download', ...names], {
    cwd: folder,
    timeout: BOOTSTRAP_MS,
    encoding: 'utf8',
  });
  if (fetched.status !== 0) {
    console.log(`skipped: no mirror can be reached: ${fetched.stderr?.split('\n')[0]}`);
    return undefined;
  }
  const packages = readdirSync(folder).filter((name) => name.endsWith('.deb'));
  for (const name of packages) execFileSync('dpkg', ['-x', join(folder, name), rootfs]);
  rmSync(folder, { recursive: true });
  return `${packages.length} packages, dpkg -x`;
}

/** Packages of which this machine has the files: the tools of this test, and what they stand on. */
const INSTALLED = [
  'docker-registry',
  'git',
  'libpython3*-stdlib',
  'perl-modules-*',
  'qemu-system-*',
  'skopeo',
  'umoci',
];

/** As they are here, attributes, links and all. */
function addInstalled(rootfs: string): void {
  const names = spawnSync('dpkg-query', ['-W', '-f', '$' + '{db:Status-Abbrev}$' + '{Package}\n', ...INSTALLED], {
    encoding: 'utf8',
  });
  const packages = names.stdout.split('\n').flatMap((line) => /^ii +(.+)/.exec(line)?.[1] ?? []);
  const listed = execFileSync('dpkg', ['-L', ...packages], { encoding: 'utf8', maxBuffer: 1 << 26 });
  const paths = listed.split('\n').filter((path) => path.startsWith('/usr/') && isFileOrLink(path));
  // Folders that are links in the root stay links.
  const pack = ['-cf', '-', '-C', '/', '--no-recursion', '--xattrs', '-T', '-'];
  const tar = execFileSync('tar', pack, { input: paths.map((path) => `.${path}\n`).join(''), maxBuffer: 1 << 30 });
  execFileSync('tar', ['-xpf', '-', '-C', rootfs, '--keep-directory-symlink', '--xattrs'], { input: tar });
}

function isFileOrLink(path: string): boolean {
  const stat = lstatSync(path, { throwIfNoEntry: false });
  return stat !== undefined && (stat.isFile() || stat.isSymbolicLink());
}

/** Layer 2: something large in a place of its own, and every kind of file. */
function addToolkit(rootfs: string): void {
  addInstalled(rootfs);
  const opt = join(rootfs, 'opt/toolkit');
  mkdirSync(join(opt, 'bin'), { recursive: true });
  const node = realpathSync(process.execPath);
  copyFileSync(node, join(opt, 'bin/node'));
  const npm = join(dirname(dirname(node)), 'lib/node_modules/npm');
  if (existsSync(npm)) cpSync(npm, join(opt, 'npm'), { recursive: true, verbatimSymlinks: true });
  const odd = join(opt, 'odd');
  mkdirSync(odd, { mode: 0o3770 });
  chmodSync(odd, 0o3770);
  const text = (name: string, content: string) => {
    writeFileSync(join(odd, name), content);
    return join(odd, name);
  };
  chownSync(text('large-ids', 'owned by a user of a namespace\n'), 3_000_000_000, 2_000_000_000);
  utimesSync(text('old', 'from 1969\n'), -1000, -1000);
  chmodSync(text('setuid', '#!/bin/sh\n'), 0o6755);
  text('empty', '');
  for (const size of [1, 4095, 4096, 4097, 65_536, 1_000_001]) text(`size-${size}`, 'x'.repeat(size));
  linkSync(join(odd, 'size-1000001'), join(opt, 'bin/linked'));
  linkSync(join(odd, 'size-1000001'), join(opt, 'linked-again'));
  writeFileSync(Buffer.concat([Buffer.from(`${odd}/not utf-8 `), Buffer.from([0xfe, 0xff, 0x0a])]), 'name');
  text(`${'long'.repeat(60)}`, 'a long name');
  symlinkSync('../'.repeat(200), join(odd, 'long-link'));
  symlinkSync('/nowhere', join(odd, 'dangling'));
  execFileSync('mkfifo', [join(odd, 'fifo')]);
  execFileSync('mknod', [join(odd, 'char'), 'c', '240', '300']);
  execFileSync('mknod', [join(odd, 'block'), 'b', '7', '70000']);
  const attributed = text('attributes', 'has attributes');
  for (let i = 0; i < 8; i++) lsetxattr(attributed, `user.number-${i}`, Buffer.from('v'.repeat(i * 60)));
  lsetxattr(attributed, 'user.binary', Buffer.from([0, 255, 10, 61, 0]));
  lsetxattr(
    join(opt, 'bin/node'),
    'security.capability',
    Buffer.from('0100000200040000000000000000000000000000', 'hex'),
  );
  const sparse = openSync(join(odd, 'sparse'), 'w');
  writeSync(sparse, 'begin');
  truncateSync(join(odd, 'sparse'), 5_000_000);
  writeSync(sparse, 'end', 5_000_000);
  closeSync(sparse);
}

/** Layer 3: what package managers and people do to the layers below. */
function change(rootfs: string): void {
  const at = (path: string) => join(rootfs, path);
  rmSync(at('usr/share/doc'), { recursive: true, force: true });
  rmSync(at('usr/share/man'), { recursive: true, force: true });
  for (const name of readdirSync(at('usr/share')).slice(0, 3)) chmodSync(at(`usr/share/${name}`), 0o711);
  // Folders become files, links and other folders; files become folders.
  rmSync(at('usr/share/locale'), { recursive: true, force: true });
  writeFileSync(at('usr/share/locale'), 'a file now\n');
  rmSync(at('opt/toolkit/npm/docs'), { recursive: true, force: true });
  mkdirSync(at('opt/toolkit/npm'), { recursive: true });
  symlinkSync('/usr/share', at('opt/toolkit/npm/docs'));
  rmSync(at('opt/toolkit/odd/empty'));
  mkdirSync(at('opt/toolkit/odd/empty/now/a/folder'), { recursive: true });
  // A folder that is removed and made again must not show what it had.
  rmSync(at('usr/lib/apt'), { recursive: true, force: true });
  mkdirSync(at('usr/lib/apt'));
  writeFileSync(at('usr/lib/apt/only-this'), 'and nothing else\n');
  // Attributes alone.
  chownSync(at('opt/toolkit/odd/size-4096'), 7, 8);
  utimesSync(at('opt/toolkit/odd/size-4097'), 1_600_000_000, 1_600_000_000.5);
  lsetxattr(at('opt/toolkit/odd/size-1'), 'user.added', Buffer.from('later'));
  // A name more, and a name less, of files below.
  linkSync(at('opt/toolkit/odd/size-65536'), at('opt/toolkit/odd/linked-later'));
  rmSync(at('opt/toolkit/linked-again'));
  writeFileSync(at('etc/motd'), 'changed\n');
  renameSync(at('opt/toolkit/odd/old'), at('opt/toolkit/odd/renamed'));
  mkdirSync(at('srv/app/src'), { recursive: true });
  for (let i = 0; i < 400; i++) writeFileSync(at(`srv/app/src/module-${i}.js`), `export default ${i};\n`.repeat(i));
}

/** Layer 4: over what layer 3 did. */
function changeAgain(rootfs: string): void {
  const at = (path: string) => join(rootfs, path);
  mkdirSync(at('usr/share/doc/returned'), { recursive: true });
  writeFileSync(at('usr/share/doc/returned/readme'), 'there was a folder here once\n');
  rmSync(at('usr/share/locale'));
  mkdirSync(at('usr/share/locale/en'), { recursive: true });
  rmSync(at('srv/app/src/module-7.js'));
  writeFileSync(at('srv/app/src/module-8.js'), readFileSync(at('srv/app/src/module-9.js')));
  rmSync(at('opt/toolkit/npm'), { recursive: true, force: true });
  rmSync(at('opt/toolkit/odd/sparse'));
  rmSync(at('usr/lib/apt'), { recursive: true });
}
