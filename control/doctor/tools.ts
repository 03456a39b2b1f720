/** The programs and libraries of this machine that DSec, its tests or its benchmarks use, and what it does without them. */
import { execFile } from 'node:child_process';
import { accessSync, constants, existsSync, readdirSync } from 'node:fs';
import { delimiter, join } from 'node:path';

export interface Tool {
  readonly name: string;
  /** How it tells its version. */
  readonly args?: readonly string[];
  /** Of a library: where it may be; `*` stands for one folder. */
  readonly files?: readonly string[];
  readonly purpose: string;
  readonly without: string;
  readonly package: string;
}

export const tools: readonly Tool[] = [
  {
    name: 'rustc',
    args: ['--version'],
    purpose: 'builds dsec-agent, which starts sandboxes fast, and a faster sha256 and gunzip',
    without: 'crun or runc starts them',
    package: 'rustc',
  },
  {
    name: 'crun',
    args: ['--version'],
    purpose: 'starts sandboxes where dsec-agent is not built, or is not wanted',
    without: 'runc is used',
    package: 'crun',
  },
  {
    name: 'runc',
    args: ['--version'],
    purpose: 'starts sandboxes where neither dsec-agent nor crun is there',
    without: 'dsec-agent or crun is used; with none of them, dsec run fails',
    package: 'runc',
  },
  {
    name: 'nft',
    args: ['--version'],
    purpose: 'networks of sandboxes with a policy',
    without: 'sandboxes have loopback alone, or the network of this machine',
    package: 'nftables',
  },
  {
    name: 'mkfs.ext4',
    args: ['-V'],
    purpose: 'disk limits of sandboxes (--disk) where no project quotas are kept',
    without: '--disk is refused there',
    package: 'e2fsprogs',
  },
  {
    name: 'libisal.so.2',
    files: ['/usr/lib/*/libisal.so.2', '/usr/lib/libisal.so.2', '/usr/lib64/libisal.so.2'],
    purpose: 'inflates gzip layers faster where linux/native is not built',
    without: 'the zlib in Node inflates',
    package: 'libisal2',
  },
  {
    name: 'libzstd.so.1',
    files: ['/usr/lib/*/libzstd.so.1', '/usr/lib/libzstd.so.1', '/usr/lib64/libzstd.so.1'],
    purpose: 'zstd layers and --compress zstd',
    without: 'they need Node 22.15 or newer',
    package: 'libzstd1',
  },
  {
    name: 'libfuse.so.2',
    files: ['/usr/lib/*/libfuse.so.2', '/lib/*/libfuse.so.2', '/usr/lib64/libfuse.so.2'],
    purpose: 'lazy reading through fuse-native where /dev/fuse cannot be used directly',
    without: 'lazy mounts need the right to mount /dev/fuse',
    package: 'libfuse2',
  },
  {
    name: 'git',
    args: ['--version'],
    purpose: 'the workspace image of npm start',
    without: 'npm start installs it',
    package: 'git',
  },
  {
    name: 'busybox',
    args: [],
    purpose: 'the base image of npm start',
    without: 'npm start installs it',
    package: 'busybox-static',
  },
  {
    name: 'skopeo',
    args: ['--version'],
    purpose: 'tests against other sources of images',
    without: 'those tests are skipped',
    package: 'skopeo',
  },
  {
    name: 'umoci',
    args: ['--version'],
    purpose: 'tests against how it unpacks images',
    without: 'those tests are skipped',
    package: 'umoci',
  },
  {
    name: 'docker-registry',
    args: ['--version'],
    purpose: 'tests against a real registry',
    without: 'those tests are skipped',
    package: 'docker-registry',
  },
  {
    name: 'fsck.erofs',
    args: ['-V'],
    purpose: 'tests that other tools accept our images',
    without: 'those tests are skipped',
    package: 'erofs-utils',
  },
  {
    name: 'mkfs.erofs',
    args: ['--version'],
    purpose: 'the peer of the conversion benchmarks',
    without: 'they are skipped',
    package: 'erofs-utils',
  },
  {
    name: 'python3',
    args: ['--version'],
    purpose: 'runs the image cases of npm test',
    without: 'they are skipped',
    package: 'python3',
  },
  {
    name: 'zstd',
    args: ['--version'],
    purpose: 'makes zstd layers in tests',
    without: 'those tests are skipped',
    package: 'zstd',
  },
];

export interface FoundTool extends Tool {
  readonly path: string | undefined;
  readonly version: string | undefined;
}

const VERSION_TIMEOUT_MS = 5000;

/** All at once; a tool that does not answer has no version. */
export function findTools(wanted: readonly Tool[] = tools): Promise<FoundTool[]> {
  return Promise.all(
    wanted.map(async (tool) => {
      const path =
        tool.files === undefined ? onPath(tool.name) : tool.files.flatMap(expand).find((file) => existsSync(file));
      const version = path === undefined || tool.args === undefined ? undefined : await versionOf(path, tool.args);
      return { ...tool, path, version };
    }),
  );
}

function onPath(name: string): string | undefined {
  // Root's tools are not on everybody's PATH.
  const folders = [...(process.env.PATH ?? '').split(delimiter), '/usr/sbin', '/sbin', '/usr/local/sbin'];
  return folders
    .filter((folder) => folder !== '')
    .map((folder) => join(folder, name))
    .find(isExecutable);
}

function isExecutable(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

function expand(pattern: string): string[] {
  const [before, after] = pattern.split('*');
  if (after === undefined) return [pattern];
  try {
    return readdirSync(before!).map((name) => `${before}${name}${after}`);
  } catch {
    return [];
  }
}

/** The first thing in its output that looks like a version. */
function versionOf(path: string, args: readonly string[]): Promise<string | undefined> {
  return new Promise((resolve) => {
    // Some of them print their version and fail, or wait for input.
    const child = execFile(
      path,
      args,
      { timeout: VERSION_TIMEOUT_MS, killSignal: 'SIGKILL' },
      (_error, stdout, stderr) => {
        resolve(/\bv?(\d+(?:\.\d+)+[\w.+~-]*)/.exec(`${stdout}\n${stderr}`)?.[1]);
      },
    );
    child.stdin?.end();
  });
}
