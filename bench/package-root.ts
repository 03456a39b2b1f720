/** A root made of packages of this machine (Debian and what is made of it), with all that they need. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';

const NOTHING_MORE = ['recommends', 'suggests', 'conflicts', 'breaks', 'replaces', 'enhances'].map(
  (one) => `--no-${one}`,
);

/** Why it cannot be made. */
export function packagesMissing(names: readonly string[]): string | undefined {
  try {
    execFileSync('dpkg-query', ['-W', ...names], { stdio: ['ignore', 'ignore', 'ignore'] });
    return undefined;
  } catch {
    return `packages ${names.join(', ')} (apt-get install ${names.join(' ')})`;
  }
}

export function fillPackageRoot(folder: string, names: readonly string[]): void {
  const needed = execFileSync('apt-cache', ['depends', '--recurse', '--installed', ...NOTHING_MORE, ...names])
    .toString()
    .split('\n')
    .filter((line) => /^[a-z0-9]/.test(line));
  // Folders that are links to those below /usr, as the machine has them.
  for (const name of ['bin', 'sbin', 'lib', 'lib64']) {
    fs.mkdirSync(join(folder, 'usr', name), { recursive: true });
    fs.symlinkSync(`usr/${name}`, join(folder, name));
  }
  for (const name of ['tmp', 'root', 'etc', 'var/tmp']) fs.mkdirSync(join(folder, name), { recursive: true });
  const files = execFileSync('dpkg-query', ['-L', ...new Set(needed)], { maxBuffer: 1 << 28 })
    .toString()
    .split('\n')
    .filter((path) => path.startsWith('/') && !path.startsWith('/usr/share/') && isFile(path));
  const tar = execFileSync('tar', ['-C', '/', '--no-recursion', '-cf', '-', '-T', '-'], {
    input: [...new Set(files)].map((path) => path.slice(1)).join('\n'),
    maxBuffer: 1 << 30,
  });
  execFileSync('tar', ['-C', folder, '--keep-directory-symlink', '-xf', '-'], { input: tar });
}

function isFile(path: string): boolean {
  const stat = fs.lstatSync(path, { throwIfNoEntry: false });
  return stat !== undefined && (stat.isFile() || stat.isSymbolicLink());
}
