/**
 * What a target may offer beyond the interface. A way out asks for each with the functions here and does without where it is not:
 * none of them changes what a client sees, only what it costs.
 */
import type { BlockTarget } from './block-target.ts';

/**
 * Answers before the call returns, where that takes no waiting for a disk or a network. A way out that has many requests at
 * hand answers all of them with one system call then, and copies nothing twice.
 */
export interface Immediate {
  /** Fills `into[at .. at + length]`. False: it would have to wait; use `read`. Throws what `read` would reject with. */
  readNow(into: Buffer, at: number, offset: number, length: number): boolean;
  /** A write without FUA. False: use `write`; nothing has been written then. The data is the caller's again on return. */
  writeNow(offset: number, data: Buffer): boolean;
}

/** A run of blocks. `hole`: takes no room; `zero`: reads as zeros. */
export interface Extent {
  readonly length: number;
  readonly hole: boolean;
  readonly zero: boolean;
}

export interface Extents {
  /** Runs from `offset` on, in order, none empty; they may end before `offset + length`, but there is at least one. */
  extents(offset: number, length: number): Promise<readonly Extent[]>;
}

/** The disk is this open file, byte for byte: a way out may go to it by itself, as a thread of its own or the kernel would. */
export interface AsFile {
  readonly fileDescriptor: number;
}

/** Reads that will come. A hint: what fails is not reported. */
export interface Prefetch {
  prefetch(offset: number, length: number): Promise<void>;
}

export function immediateOf(target: BlockTarget & Partial<Immediate>): Immediate | undefined {
  return typeof target.readNow === 'function' && typeof target.writeNow === 'function'
    ? (target as BlockTarget & Immediate)
    : undefined;
}

export function extentsOf(target: BlockTarget & Partial<Extents>): Extents | undefined {
  return typeof target.extents === 'function' ? (target as BlockTarget & Extents) : undefined;
}

export function prefetchOf(target: BlockTarget & Partial<Prefetch>): Prefetch | undefined {
  return typeof target.prefetch === 'function' ? (target as BlockTarget & Prefetch) : undefined;
}

export function fileOf(target: BlockTarget & Partial<AsFile>): number | undefined {
  return target.fileDescriptor;
}
