/**
 * Shared libraries of the system (ISA-L, zstd), through koffi. It is loaded by the first use, not by the import: it costs
 * 20 ms that most commands do not need to spend. Nothing here is required: callers go on without a library that is missing.
 */
import { createRequire } from 'node:module';

/** A bound C function. `async` runs it on another thread; Buffers among the arguments are held until it is done. */
export interface NativeFunction {
  (...args: unknown[]): unknown;
  async(...args: unknown[]): void;
}

export interface NativeLibrary {
  /** @param prototype as in C */
  bind(prototype: string): NativeFunction;
}

interface Koffi {
  load(path: string): { func(prototype: string): NativeFunction };
  address?(bytes: Buffer): bigint;
}

let koffi: Koffi | undefined;

/** @throws when there is no such library, or koffi cannot tell the address of a Buffer. */
export function openNativeLibrary(name: string): NativeLibrary {
  koffi ??= createRequire(import.meta.url)('koffi') as Koffi;
  if (koffi.address === undefined) throw new Error('this koffi is too old');
  const handle = koffi.load(name);
  return { bind: (prototype) => handle.func(prototype) };
}

/** Where the bytes are in memory; holds as long as the Buffer is referenced. */
export function addressOf(bytes: Buffer): bigint {
  return koffi!.address!(bytes);
}
