/**
 * Shared libraries, of the system (ISA-L, zstd) or our own (native.ts), through koffi. It is loaded by the first use, not by the import: it costs
 * 20 ms that most commands do not need to spend. Nothing here is required: callers go on without a library that is missing.
 */
import { createRequire } from 'node:module';

/** A bound C function. `async` runs it on another thread; Buffers among the arguments are held until it is done. */
export interface LibraryFunction {
  (...args: unknown[]): unknown;
  async(...args: unknown[]): void;
}

export interface SystemLibrary {
  /** @param prototype as in C */
  bind(prototype: string): LibraryFunction;
}

interface Koffi {
  load(path: string): { func(prototype: string): LibraryFunction };
}

let koffi: Koffi | undefined;

/** @throws when there is no such library */
export function openSystemLibrary(name: string): SystemLibrary {
  koffi ??= createRequire(import.meta.url)('koffi') as Koffi;
  const handle = koffi.load(name);
  return { bind: (prototype) => handle.func(prototype) };
}
