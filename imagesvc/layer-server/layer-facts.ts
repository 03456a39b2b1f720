/**
 * An EROFS layer as the layer server knows it, in words that can be sent to another thread or process, or written down.
 */
import type { Digest } from '#base';

/** A blob as a file. */
export interface LayerFile {
  readonly path: string;
  readonly digest: Digest;
  readonly sizeBytes: number;
  /** Whoever serves the file verifies every byte; else it is proved whole before it is read. */
  readonly verifiedOnRead: boolean;
}

export interface LayerFiles {
  readonly meta: LayerFile;
  /** In slot order. */
  readonly devices: readonly LayerFile[];
}

export interface RegisteredLayer extends LayerFiles {
  /** 1 and up, in the order in which layers were added; the same for every server of one mount. */
  readonly number: number;
}

/** What a thread needs to read a layer. Descriptors stay open for as long as the process lives: no thread can meet another's. */
export interface OpenedLayer {
  readonly number: number;
  /** Of the metadata: the layer's name. */
  readonly digest: Digest;
  /** The metadata, shared by all threads; or, of a very large one, a path of it. */
  readonly meta: SharedArrayBuffer | string;
  readonly devices: readonly OpenedDevice[];
}

export interface OpenedDevice {
  readonly fd: number;
  readonly sizeBytes: number;
  /** Another process fetches what is read: whoever reads may wait. */
  readonly waits: boolean;
}

/**
 * Node ids: the root is 1; an inode of layer `number` is number * 2^36 + its nid. Computed, so that nothing has to be
 * remembered between requests, by any thread of any server. OverlayFS needs the two highest bits of an inode number free, Node
 * the eleven highest: 131,071 layers.
 */
const LAYER_NODES = 2 ** 36;
export const MAX_LAYER_NUMBER = 2 ** 17 - 1;
export const ROOT_NODE = 1;

export function nodeOf(number: number, nid: number): number {
  return number * LAYER_NODES + nid;
}

/** 0 for the root. */
export function layerNumberOf(node: number): number {
  return Math.floor(node / LAYER_NODES);
}

export function nidOf(node: number): number {
  return node % LAYER_NODES;
}
