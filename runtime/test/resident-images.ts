/** The images that the conformance suite runs on: busybox, a Debian-like one with bash and shared libraries, one without any shell, one of musl. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { dirname, join } from 'node:path';
import { fillMusl, muslMissing } from './musl-image.ts';
import { busybox } from './sandbox-fixture.ts';

export interface TestImage {
  readonly name: string;
  /** A command line that runs a tool of the usual name. */
  tool(name: string, ...args: readonly string[]): string[];
  readonly hasShell: boolean;
  fill(folder: string): void;
}

const ACCOUNTS = {
  passwd: 'root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n',
  group: 'root:x:0:\nagent:x:1000:\nextra:x:1001:agent\n',
};

function basics(folder: string): void {
  for (const name of ['etc', 'root', 'home', 'home/agent', 'tmp', 'work'])
    fs.mkdirSync(join(folder, name), { recursive: true });
  fs.chmodSync(join(folder, 'tmp'), 0o1777);
  fs.chownSync(join(folder, 'home/agent'), 1000, 1000);
  for (const [name, text] of Object.entries(ACCOUNTS)) fs.writeFileSync(join(folder, 'etc', name), text);
}

const TOOLS = [
  'bash',
  'dash',
  'cat',
  'id',
  'env',
  'pwd',
  'sleep',
  'true',
  'false',
  'stty',
  'printf',
  'head',
  'mkdir',
  'ln',
  'mv',
  'rm',
  'dd',
  'tty',
  'ls',
  'yes',
  'setsid',
  'cut',
];

/** Programs of this machine with the libraries that they name. */
function debianLike(folder: string): void {
  basics(folder);
  const copy = (path: string) => {
    const target = join(folder, path);
    if (fs.existsSync(target)) return;
    fs.mkdirSync(dirname(target), { recursive: true });
    fs.copyFileSync(path, target);
    fs.chmodSync(target, 0o755);
  };
  fs.mkdirSync(join(folder, 'usr/bin'), { recursive: true });
  for (const tool of TOOLS) {
    const found = execFileSync('sh', ['-c', `command -v ${tool}`])
      .toString()
      .trim();
    // The shell's own of that name.
    const real = fs.realpathSync(found.startsWith('/') ? found : `/usr/bin/${tool}`);
    const target = join(folder, 'usr/bin', tool);
    fs.copyFileSync(real, target);
    fs.chmodSync(target, 0o755);
    for (const [path] of execFileSync('ldd', [real]).toString().matchAll(/\/\S+/g)) copy(path);
  }
  fs.symlinkSync('usr/bin', join(folder, 'bin'));
  fs.symlinkSync('dash', join(folder, 'usr/bin/sh'));
}

function plain(name: string, ...args: readonly string[]): string[] {
  return [name, ...args];
}

function muslImages(): TestImage[] {
  const missing = muslMissing();
  if (missing !== undefined) {
    console.log(`skipped: the image of musl: ${missing}`);
    return [];
  }
  const fill = (folder: string) => {
    basics(folder);
    fillMusl(folder, ['sh', ...TOOLS.filter((tool) => tool !== 'bash' && tool !== 'dash')]);
  };
  return [{ name: 'musl', hasShell: true, tool: plain, fill }];
}

export const TEST_IMAGES: readonly TestImage[] = [
  {
    name: 'busybox',
    hasShell: true,
    tool: plain,
    fill(folder) {
      busybox(folder);
      const had = new Set(fs.readdirSync(join(folder, 'bin')));
      for (const tool of TOOLS) {
        if (tool !== 'bash' && tool !== 'dash' && !had.has(tool)) fs.symlinkSync('busybox', join(folder, 'bin', tool));
      }
      basics(folder);
    },
  },
  { name: 'debian-like', hasShell: true, tool: plain, fill: debianLike },
  {
    name: 'shell-less',
    hasShell: false,
    tool: (name, ...args) => ['/busybox', name, ...args],
    fill(folder) {
      basics(folder);
      fs.copyFileSync('/bin/busybox', join(folder, 'busybox'));
      fs.chmodSync(join(folder, 'busybox'), 0o755);
    },
  },
  ...muslImages(),
];
