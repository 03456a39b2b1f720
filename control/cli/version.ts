/** The version in package.json, and the project's root: the same from source and from a bundle in dist/. */
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

let found: { root: string; version: string } | undefined;

function project(): { root: string; version: string } {
  if (found !== undefined) return found;
  for (let folder = dirname(fileURLToPath(import.meta.url)); folder !== dirname(folder); folder = dirname(folder)) {
    try {
      const { name, version } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8')) as {
        name?: string;
        version?: string;
      };
      if (name === 'dsec' && version !== undefined) {
        found = { root: folder, version };
        return found;
      }
    } catch {
      // No package.json here: one folder up.
    }
  }
  throw new Error('package.json of dsec is not above this file');
}

export function projectVersion(): string {
  return project().version;
}

export function projectRoot(): string {
  return project().root;
}
