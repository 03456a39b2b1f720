/** Where clients look for the runtime service (bin/dsec says the same), and whether one is there. */
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';

export function serviceSocket(runDir: string): string {
  return join(runDir, 'runtime.sock');
}

export function serviceState(runDir: string): { readonly socket: string; readonly listens: boolean } {
  const socket = serviceSocket(runDir);
  return { socket, listens: existsSync(socket) && isListening(socket) };
}

/** A socket file alone may be what a killed service left. */
function isListening(socket: string): boolean {
  try {
    return readFileSync('/proc/net/unix', 'utf8')
      .split('\n')
      .some((line) => line.endsWith(` ${socket}`));
  } catch {
    return false;
  }
}
