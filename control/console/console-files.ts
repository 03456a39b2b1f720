/**
 * The files of the console, as they are served: all that lies in web/, a few of xterm's and noVNC's modules, read once, each with its type and a strong ETag.
 * A list made at the start instead of a folder that requests look into: no path of a request ever reaches the file system.
 */
import { createHash } from 'node:crypto';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, extname, join, relative, sep } from 'node:path';
import { fileURLToPath } from 'node:url';
import { fail } from '../errors.ts';

export interface ConsoleFile {
  readonly type: string;
  readonly bytes: Buffer;
  readonly etag: string;
}

const TYPES: Readonly<Record<string, string>> = {
  '.css': 'text/css; charset=utf-8',
  '.html': 'text/html; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.mjs': 'text/javascript; charset=utf-8',
  '.svg': 'image/svg+xml',
};

/** Path below /console/ -> where it lies in the project. */
const FROM_PACKAGES: Readonly<Record<string, string>> = {
  'vendor/xterm.mjs': 'node_modules/@xterm/xterm/lib/xterm.mjs',
  'vendor/xterm.css': 'node_modules/@xterm/xterm/css/xterm.css',
};

/** Folders of modules: below this path -> where they lie. Loaded by the page when a screen is looked at. */
const MODULES_FROM_PACKAGES: Readonly<Record<string, string>> = {
  'vendor/novnc/core': 'node_modules/@novnc/novnc/core',
  'vendor/novnc/vendor': 'node_modules/@novnc/novnc/vendor',
};

/** By the path below /console/; '' is the page. @throws CONSOLE_MISSING */
export function consoleFiles(): ReadonlyMap<string, ConsoleFile> {
  const root = rootFolder();
  const folder = join(root, 'control/console/web');
  const files = new Map<string, ConsoleFile>();
  const take = (from: string, below: string, types: Readonly<Record<string, string>>) => {
    if (!existsSync(from)) throw fail('CONSOLE_MISSING', { path: from });
    for (const entry of readdirSync(from, { recursive: true, withFileTypes: true })) {
      const path = join(entry.parentPath, entry.name);
      const type = types[extname(entry.name)];
      if (!entry.isFile() || type === undefined) continue;
      files.set(`${below}${relative(from, path).split(sep).join('/')}`, read(path, type));
    }
  };
  take(folder, '', TYPES);
  for (const [below, from] of Object.entries(MODULES_FROM_PACKAGES)) {
    take(join(root, from), `${below}/`, { '.js': TYPES['.js']! });
  }
  for (const [name, path] of Object.entries(FROM_PACKAGES)) {
    files.set(name, read(join(root, path), TYPES[extname(name)]!));
  }
  const page = files.get('index.html');
  if (page === undefined) throw fail('CONSOLE_MISSING', { path: join(folder, 'index.html') });
  return files.set('', page);
}

function read(path: string, type: string): ConsoleFile {
  if (!existsSync(path)) throw fail('CONSOLE_MISSING', { path });
  const bytes = readFileSync(path);
  return { type, bytes, etag: `"${createHash('sha256').update(bytes).digest('base64url').slice(0, 27)}"` };
}

/** The checkout, whether this is a source file or a bundle in dist/. */
function rootFolder(): string {
  for (let folder = dirname(fileURLToPath(import.meta.url)); ; folder = dirname(folder)) {
    if (existsSync(join(folder, 'control/console/web/index.html'))) return folder;
    if (folder === dirname(folder)) throw fail('CONSOLE_MISSING', { path: 'control/console/web/index.html' });
  }
}
