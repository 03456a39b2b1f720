/**
 * The one compiled library of our own (linux/native/): built by scripts/native.mjs where there is a rustc, found by the digest of
 * its sources, so that an old build is never loaded. Nothing needs it: whoever calls has the same in JavaScript or in Node.
 */
import { createHash } from 'node:crypto';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { messageOf } from '#base';
import { openSystemLibrary } from './system-library.ts';

/** A bound C function; Buffers are pointers to their bytes. `async`: see LibraryFunction. */
export interface NativeCall {
  (...args: (number | Buffer | null)[]): number;
  async(...args: unknown[]): void;
}

export interface NativeLibrary {
  /** @param prototype as in C */
  bind(prototype: string): NativeCall;
}

/** The library, or why there is none. */
export type FoundNative =
  | { readonly library: NativeLibrary; readonly path: string }
  | { readonly library: undefined; readonly reason: string };

const SOURCES = 'linux/native';

let found: FoundNative | undefined;

export function nativeLibrary(): FoundNative {
  found ??= find();
  return found;
}

function find(): FoundNative {
  const none = (reason: string): FoundNative => ({ library: undefined, reason });
  if (process.env.DSEC_NATIVE === '0') return none('turned off by DSEC_NATIVE=0');
  if (process.arch !== 'x64') return none(`there is none for ${process.arch}`);
  const root = checkout();
  if (root === undefined) return none('its source is not in this installation');
  try {
    const path = join(root, 'dist', nativeFile(join(root, SOURCES)));
    if (!existsSync(path)) return none('not built: npm start builds it where rustc is');
    return { library: openSystemLibrary(path) as NativeLibrary, path };
  } catch (error) {
    return none(messageOf(error));
  }
}

/** scripts/native.mjs names it in the same way. */
function nativeFile(sources: string): string {
  const hash = createHash('sha256');
  for (const name of readdirSync(sources).sort())
    if (name.endsWith('.rs')) hash.update(readFileSync(join(sources, name)));
  return `dsec-native-${hash.digest('hex').slice(0, 16)}.so`;
}

/** Bundled or not, this code lies somewhere below it. */
function checkout(): string | undefined {
  for (let folder = dirname(fileURLToPath(import.meta.url)); ; folder = dirname(folder)) {
    if (existsSync(join(folder, SOURCES))) return folder;
    if (folder === dirname(folder)) return undefined;
  }
}
