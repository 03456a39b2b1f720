/**
 * Paths inside a mounted root, resolved as a process in it would see them: symlinks and `..` never lead out. For roots at
 * rest, before anything runs in them (nothing guards against a link that is swapped between two steps).
 */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { systemCode } from '#base';
import { fail } from '../errors.ts';

export interface RootPath {
  /** Path on this machine, free of symlinks below the root. */
  readonly host: string;
  /** The same path as seen inside, absolute. */
  readonly inside: string;
  /** Undefined when nothing is there: then all but the last name exist. */
  readonly stat: fs.Stats | undefined;
}

/** As Linux. */
const MAX_LINKS = 40;

/**
 * Undefined when a directory on the way is missing or is none. The last name may be missing.
 * @throws RUNTIME_PATH for a loop of symlinks, and for a NUL byte
 */
export function resolveInRoot(root: string, path: string): RootPath | undefined {
  if (path.includes('\0')) throw fail('RUNTIME_PATH', { path: JSON.stringify(path), problem: 'it holds a NUL byte' });
  const done: string[] = [];
  const todo = path.split('/').reverse();
  let links = 0;
  let stat: fs.Stats | undefined = fs.lstatSync(root);
  while (todo.length > 0) {
    const name = todo.pop()!;
    if (name === '' || name === '.') {
      // "file/" and "file/." name a directory.
      if (stat !== undefined && !stat.isDirectory()) return undefined;
      continue;
    }
    if (stat === undefined || !stat.isDirectory()) return undefined;
    if (name === '..') {
      done.pop();
      stat = fs.lstatSync(join(root, ...done));
      continue;
    }
    const host = join(root, ...done, name);
    stat = lstat(host);
    if (stat?.isSymbolicLink() !== true) {
      done.push(name);
      continue;
    }
    if (++links > MAX_LINKS) throw fail('RUNTIME_PATH', { path, problem: 'too many symbolic links on the way' });
    const target = fs.readlinkSync(host);
    if (target.startsWith('/')) done.length = 0;
    todo.push(...target.split('/').reverse());
    stat = fs.lstatSync(join(root, ...done));
  }
  return { host: join(root, ...done), inside: `/${done.join('/')}`, stat };
}

function lstat(path: string): fs.Stats | undefined {
  try {
    return fs.lstatSync(path);
  } catch (error) {
    if (['ENOENT', 'ENOTDIR', 'ENAMETOOLONG'].includes(systemCode(error) ?? '')) return undefined;
    throw error;
  }
}

/** The content of a regular file, undefined when there is none. @throws RUNTIME_PATH when it is longer than `limitBytes` */
export function readFileInRoot(root: string, path: string, limitBytes: number): Buffer | undefined {
  const found = resolveInRoot(root, path);
  if (found?.stat?.isFile() !== true) return undefined;
  if (found.stat.size > limitBytes) {
    throw fail('RUNTIME_PATH', {
      path,
      problem: `has ${found.stat.size} bytes, more than the ${limitBytes} that are read`,
    });
  }
  return fs.readFileSync(found.host);
}

/** The first bytes of a regular file that `resolveInRoot` found. */
export function readHead(path: RootPath, length: number): Buffer {
  const fd = fs.openSync(path.host, fs.constants.O_RDONLY | fs.constants.O_NOFOLLOW | fs.constants.O_NONBLOCK);
  try {
    const buffer = Buffer.alloc(length);
    return buffer.subarray(0, fs.readSync(fd, buffer, 0, length, 0));
  } finally {
    fs.closeSync(fd);
  }
}

/** Makes a directory and the parents that are missing, 0755 root:root. Returns the paths made, outermost first. */
export function makeDirectoryInRoot(root: string, path: string): string[] {
  const made: string[] = [];
  let prefix = '';
  for (const name of path.split('/')) {
    if (name === '' || name === '.') continue;
    prefix += `/${name}`;
    const found = resolveInRoot(root, prefix);
    if (found === undefined) throw fail('RUNTIME_PATH', { path, problem: 'a name on the way is not a directory' });
    if (found.stat?.isDirectory() === true) continue;
    if (found.stat !== undefined) throw fail('RUNTIME_PATH', { path, problem: `${found.inside} is not a directory` });
    fs.mkdirSync(found.host);
    fs.chmodSync(found.host, 0o755);
    made.push(found.host);
  }
  return made;
}
