/** Under sudo the default store is root's: whoever converted without it looks in the wrong place. */
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';

/** The default store of the user who called sudo, when there is one and root's was looked in. */
export function storeOfSudoUser(
  env: NodeJS.ProcessEnv = process.env,
  uid = process.getuid?.(),
  passwd = '/etc/passwd',
): string | undefined {
  const { SUDO_USER: user, DSEC_STORE: chosen } = env;
  if (uid !== 0 || !user || user === 'root' || chosen) return undefined;
  const home = homeOf(user, passwd);
  if (home === undefined) return undefined;
  // Where $XDG_DATA_HOME of that user leads, root is not told.
  const store = join(home, '.local/share/dsec/store');
  return existsSync(store) ? store : undefined;
}

function homeOf(user: string, passwd: string): string | undefined {
  try {
    const line = readFileSync(passwd, 'utf8')
      .split('\n')
      .find((text) => text.startsWith(`${user}:`));
    return line?.split(':')[5] || undefined;
  } catch {
    return undefined;
  }
}
