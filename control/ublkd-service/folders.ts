/** Where the block service keeps its table and its sockets, and where it is found. */
import { dirname, join, resolve } from 'node:path';
import { disksFolder } from '#ublk-daemon';

export interface ServiceFolders {
  /** Beside the disks: what is attached stays so over a reboot. */
  readonly stateDir: string;
  /** Sockets and mount points of disks. */
  readonly runDir: string;
  /** Of the service itself. */
  readonly socket: string;
}

export function serviceFolders(env: NodeJS.ProcessEnv = process.env): ServiceFolders {
  const run = resolve(env.DSEC_RUN || userRunFolder(env) || '/run/dsec');
  return {
    stateDir: join(dirname(disksFolder()), 'ublkd'),
    runDir: join(run, 'ublkd'),
    socket: join(run, 'ublkd.sock'),
  };
}

/** NBD needs no root: another user has a service of his own where there is a place for it. */
function userRunFolder(env: NodeJS.ProcessEnv): string | undefined {
  if (process.geteuid?.() === 0 || !env.XDG_RUNTIME_DIR?.startsWith('/')) return undefined;
  return join(env.XDG_RUNTIME_DIR, 'dsec');
}
