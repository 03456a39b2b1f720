/**
 * Two trees of the kinds that images are made of, as tars: this project's node_modules, and the files of Debian's required
 * and important packages (what a minimal Debian consists of), as they lie on this machine. Without dpkg,
 * /usr/share takes its place.
 */
import { spawnSync } from 'node:child_process';
import { lstatSync } from 'node:fs';
import { join } from 'node:path';
import { type ByteString, bytesOf } from '#base';
import { projectRoot } from './dsec-command.ts';
import { findTool } from './tool.ts';

/** dpkg-query's own placeholders. */
// biome-ignore lint/suspicious/noTemplateCurlyInString: they are not ours to fill
const FORMAT = '${Package} ${Priority}\\n';

export interface Tree {
  readonly name: string;
  /** Absolute paths in byte order, parents before children. */
  readonly paths: readonly ByteString[];
}

export function someTrees(): Tree[] {
  const trees = [{ name: 'node_modules', paths: everythingBelow(join(projectRoot(), 'node_modules')) }];
  const debian = debianPaths();
  if (debian.length > 0) trees.push({ name: 'debian', paths: debian });
  else trees.push({ name: 'usr-share', paths: everythingBelow('/usr/share') });
  return trees;
}

function everythingBelow(folder: string): ByteString[] {
  const { stdout } = spawnSync(
    'find',
    [folder, '-xdev', '(', '-type', 'f', '-o', '-type', 'd', '-o', '-type', 'l', ')', '-print0'],
    {
      maxBuffer: 1 << 30,
      encoding: 'latin1',
    },
  );
  return stdout
    .split('\0')
    .filter((path) => path !== '')
    .sort();
}

function debianPaths(): ByteString[] {
  if (findTool('dpkg-query') === undefined) return [];
  const query = (args: string[]) =>
    spawnSync('dpkg-query', args, { maxBuffer: 1 << 30, encoding: 'latin1' }).stdout.split('\n');
  const packages = query(['-W', '-f', FORMAT])
    .filter((line) => / (?:required|important)$/.test(line))
    .map((line) => line.split(' ')[0]!);
  if (packages.length === 0) return [];
  const listed = new Set(query(['-L', ...packages]).filter((path) => path.startsWith('/') && path !== '/.'));
  return [...listed].filter(isTreeMember).sort();
}

/** What dpkg lists may have been removed, or lie behind a link of a merged /usr. */
function isTreeMember(path: ByteString): boolean {
  const stat = lstatSync(bytesOf(path), { throwIfNoEntry: false });
  if (stat === undefined) return false;
  const parts = path.split('/');
  for (let i = 2; i < parts.length; i++) {
    if (lstatSync(bytesOf(parts.slice(0, i).join('/'))).isSymbolicLink()) return false;
  }
  return stat.isFile() || stat.isDirectory() || stat.isSymbolicLink();
}
