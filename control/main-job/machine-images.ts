/**
 * Three ordinary OCI images out of what this machine has, in one layout:
 *
 *     base       a static busybox with a user table and configuration: two layers
 *     toolkit    the Node that runs us with its shared libraries, and npm: two layers, thousands of files
 *     workspace  a small git repository
 */
import { execFile } from 'node:child_process';
import { existsSync, realpathSync } from 'node:fs';
import { mkdir, stat, writeFile } from 'node:fs/promises';
import { delimiter, dirname, join } from 'node:path';
import { promisify } from 'node:util';
import { systemCode } from '#base';
import { fail } from '../errors.ts';
import { folderMembers, LayoutWriter, type Member, type WrittenLayer } from './layout-writer.ts';

const run = promisify(execFile);

export const PATH = '/usr/local/bin:/usr/bin:/bin';

export interface MachineImage {
  readonly tag: 'base' | 'toolkit' | 'workspace';
  readonly about: string;
  readonly layers: readonly WrittenLayer[];
}

/** Writes the layout into `folder`, with scratch files in `scratch`. */
export async function makeMachineImages(folder: string, scratch: string, signal: AbortSignal): Promise<MachineImage[]> {
  const layout = new LayoutWriter(folder);
  await layout.open();
  const layers = (groups: readonly (readonly Member[])[]) =>
    Promise.all(groups.map((members) => layout.addLayer(members, signal)));

  const base = await layers(await baseLayers());
  await layout.addImage('base', base, { env: [`PATH=${PATH}`], cmd: ['/bin/sh'] });
  const node = await nodeMembers();
  const npm = await npmMembers();
  const toolkit = await layers(npm === undefined ? [node] : [node, npm]);
  await layout.addImage('toolkit', toolkit, { env: [`PATH=${PATH}`], cmd: ['node'] });
  const workspace = await layers([await workspaceMembers(join(scratch, 'workspace'), signal)]);
  await layout.addImage('workspace', workspace, { env: [`PATH=${PATH}`], workingDir: '/workspace' });
  return [
    { tag: 'base', about: 'a static busybox', layers: base },
    { tag: 'toolkit', about: `Node ${process.versions.node}${npm === undefined ? '' : ' and npm'}`, layers: toolkit },
    { tag: 'workspace', about: 'a small git repository', layers: workspace },
  ];
}

async function baseLayers(): Promise<Member[][]> {
  const busybox = findBusybox();
  const { stdout } = await run(busybox, ['--list']);
  const applets = stdout.split('\n').filter((name) => /^[\w[\]-]+$/.test(name) && name !== 'busybox');
  const folders = [
    'bin',
    'dev',
    'etc',
    'home',
    'lib',
    'proc',
    'root',
    'sys',
    'usr',
    'usr/bin',
    'usr/local',
    'var',
    'var/lib',
  ];
  const system: Member[] = [
    ...folders.map((path): Member => ({ kind: 'dir', path, mode: path === 'root' ? 0o700 : 0o755 })),
    { kind: 'dir', path: 'tmp', mode: 0o1777 },
    await copy(busybox, 'bin/busybox', 0o755),
    ...applets.map((name): Member => ({ kind: 'symlink', path: `bin/${name}`, target: 'busybox' })),
    { kind: 'file', path: 'etc/motd', content: 'replaced by the layer above\n' },
  ];
  const settings: Member[] = [
    {
      kind: 'file',
      path: 'etc/passwd',
      content: 'root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n',
    },
    { kind: 'file', path: 'etc/group', content: 'root:x:0:\nuser:x:1000:\n' },
    { kind: 'file', path: 'etc/os-release', content: 'ID=busybox\nNAME="busybox"\nPRETTY_NAME="busybox, static"\n' },
    { kind: 'file', path: 'etc/motd', content: 'welcome\n' },
  ];
  return [system, settings];
}

function findBusybox(): string {
  const found = ['/bin/busybox', '/usr/bin/busybox'].find((path) => existsSync(path));
  if (found === undefined) throw fail('MAIN_JOB_TOOL', { tool: 'busybox', package: 'busybox-static' });
  return found;
}

/** The running executable and every shared library it is linked with, where the loader looks for them. */
async function nodeMembers(): Promise<Member[]> {
  const node = realpathSync(process.execPath);
  const members = [await copy(node, 'usr/local/bin/node', 0o755)];
  for (const library of await sharedLibraries(node)) members.push(await copy(library, library.slice(1), 0o755));
  return members;
}

async function sharedLibraries(program: string): Promise<string[]> {
  try {
    const { stdout } = await run('ldd', [program], { env: { ...process.env, LC_ALL: 'C' } });
    const found = stdout.split('\n').map((line) => /^\s*(?:\S+ => )?(\/\S+) \(0x/.exec(line)?.[1]);
    return [...new Set(found.filter((path) => path !== undefined))];
  } catch (error) {
    // A static executable: ldd says so with a status of 1.
    if (systemCode(error) !== 'ENOENT') return [];
    throw fail('MAIN_JOB_TOOL', { tool: 'ldd', package: 'libc-bin' });
  }
}

/** npm as it is installed beside this Node; undefined when there is none. */
async function npmMembers(): Promise<Member[] | undefined> {
  const folder = npmFolder();
  if (folder === undefined) return undefined;
  return [
    ...(await folderMembers(folder, 'usr/local/lib/node_modules/npm')),
    { kind: 'symlink', path: 'usr/local/bin/npm', target: '../lib/node_modules/npm/bin/npm-cli.js' },
  ];
}

function npmFolder(): string | undefined {
  const places = [dirname(process.execPath), ...(process.env.PATH ?? '').split(delimiter)];
  for (const place of places) {
    try {
      const program = realpathSync(join(place, 'npm'));
      const folder = dirname(dirname(program));
      if (existsSync(join(folder, 'package.json')) && existsSync(join(folder, 'bin/npm-cli.js'))) return folder;
    } catch {
      // Not here.
    }
  }
  return undefined;
}

const WORKSPACE: Readonly<Record<string, string>> = {
  'README.md': '# Word count\n\nCounts words: `node count.js FILE`.\n',
  'count.js': `import { readFileSync } from 'node:fs';
import { words } from './words.js';
const file = process.argv[2];
console.log(words(readFileSync(file, 'utf8')) + ' words in ' + file);
`,
  'words.js': 'export const words = (text) => text.split(/\\s+/).filter(Boolean).length;\n',
  'package.json': '{"name":"count","type":"module","private":true}\n',
  'old-notes.txt': 'to be removed\n',
};

async function workspaceMembers(folder: string, signal: AbortSignal): Promise<Member[]> {
  await mkdir(folder, { recursive: true });
  for (const [name, text] of Object.entries(WORKSPACE)) await writeFile(join(folder, name), text);
  const git = (...args: string[]) => run('git', args, { cwd: folder, env: { ...process.env, ...GIT }, signal });
  try {
    await git('init', '-q', '-b', 'main', '--template=');
    await git('add', '.');
    await git('commit', '-q', '-m', 'Count words');
  } catch (error) {
    if (systemCode(error) === 'ENOENT') throw fail('MAIN_JOB_TOOL', { tool: 'git', package: 'git' });
    throw error;
  }
  return [{ kind: 'dir', path: 'workspace' }, ...(await folderMembers(folder, 'workspace'))];
}

/** Neither this user's settings nor the clock get into the repository. */
const GIT: Readonly<Record<string, string>> = {
  GIT_CONFIG_GLOBAL: '/dev/null',
  GIT_CONFIG_SYSTEM: '/dev/null',
  GIT_AUTHOR_NAME: 'dsec',
  GIT_AUTHOR_EMAIL: 'dsec@localhost',
  GIT_AUTHOR_DATE: '2024-01-01T00:00:00Z',
  GIT_COMMITTER_NAME: 'dsec',
  GIT_COMMITTER_EMAIL: 'dsec@localhost',
  GIT_COMMITTER_DATE: '2024-01-01T00:00:00Z',
};

async function copy(from: string, path: string, mode: number): Promise<Member> {
  return { kind: 'copy', path, mode, from, sizeBytes: (await stat(from)).size };
}

/** A layout with one image, `tools`: a static busybox where no image has anything of its own. */
export async function makeTools(folder: string, signal: AbortSignal): Promise<void> {
  const layout = new LayoutWriter(folder);
  await layout.open();
  const layer = await layout.addLayer([await copy(findBusybox(), '.dsec-tools/busybox', 0o755)], signal);
  await layout.addImage('tools', [layer], {});
}
