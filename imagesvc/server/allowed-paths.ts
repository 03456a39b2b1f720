/**
 * Which paths of the server's machine a request may name: sources of conversions, uppers, mount points. None unless whoever
 * runs the service allows folders; otherwise a token to convert would be a token to read every file of the machine.
 *
 * Symbolic links are resolved first, and the resolved path is what is worked with afterwards.
 */
import { realpathSync } from 'node:fs';
import { basename, dirname, isAbsolute, join, resolve } from 'node:path';
import { parseSourceReference } from '#converter';
import { fail } from '../errors.ts';

export class AllowedPaths {
  readonly #folders: readonly string[];

  constructor(folders: readonly string[] = []) {
    this.#folders = folders.map((folder) => real(resolve(folder)));
  }

  /** The path with links resolved. Its end need not exist. @throws SERVER_PATH_DENIED */
  check(path: string): string {
    if (!isAbsolute(path) || path.includes('\0')) throw fail('SERVER_PATH_DENIED', { path });
    const found = real(resolve(path));
    const allowed = this.#folders.some(
      (folder) => folder === '/' || found === folder || found.startsWith(`${folder}/`),
    );
    // Said alike whether it exists or not.
    if (!allowed) throw fail('SERVER_PATH_DENIED', { path });
    return found;
  }

  /** The source with links in its path resolved; one in a registry as it is. @throws SERVER_PATH_DENIED, SOURCE_* */
  checkSource(text: string): string {
    // Before anything looks whether the path is there.
    const local = /^(oci|oci-archive|docker-archive|tar|dir):(.*)$/s.exec(text);
    if (local === null) {
      parseSourceReference(text);
      return text;
    }
    const [, scheme = '', rest = ''] = local;
    if (scheme === 'tar' || scheme === 'dir') return `${scheme}:${this.check(rest)}`;
    const colon = rest.indexOf(':');
    const path = this.check(colon < 0 ? rest : rest.slice(0, colon));
    const source = `${scheme}:${path}${colon < 0 ? '' : rest.slice(colon)}`;
    parseSourceReference(source);
    return source;
  }
}

/** `realpath` of what exists of it, the rest added. */
function real(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    const parent = dirname(path);
    return parent === path ? path : join(real(parent), basename(path));
  }
}
