/**
 * `config.v1.json`: which layers make a disk, bottom first, and the writable one on top, as the OverlayBD tools have it. Fields that we do
 * not know are kept when a file is written again.
 */
import { constants, open } from 'node:fs/promises';
import { isAbsolute, join, resolve } from 'node:path';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import { type LayerPlace, storeLayerOf } from '../layer/store-layer.ts';

export interface LowerConfig {
  /** The layer's file. */
  readonly file?: string;
  /** Or a folder: `overlaybd.commit` in it, else `overlaybd.sealed`. */
  readonly dir?: string;
  /** Or a blob of `repoBlobUrl`, or of the store that `dsec` names (layer/store-layer.ts). */
  readonly digest?: string;
  readonly size?: number;
  readonly [other: string]: unknown;
}

export interface UpperConfig {
  readonly data: string;
  /** Missing where the layer is sparse. */
  readonly index?: string;
  readonly [other: string]: unknown;
}

export interface DiskConfig {
  readonly repoBlobUrl?: string;
  readonly lowers: readonly LowerConfig[];
  readonly upper?: UpperConfig;
  readonly resultFile?: string;
  readonly [other: string]: unknown;
}

/** Of the largest there is: 255 lowers with long names take a tenth of it. */
const MAX_BYTES = 4 * 1024 * 1024;
/** As many as the C++ tools stack. */
const MAX_LOWERS = 255;
/** Names of a layer in a folder, first the one that is looked for first. */
export const LAYER_NAMES = ['overlaybd.commit', 'overlaybd.sealed'] as const;

export function parseDiskConfig(text: string, file: string): DiskConfig {
  const refuse = (problem: string) => fail('DISK_CONFIG', { file, problem });
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw refuse(`not JSON: ${messageOf(error)}`);
  }
  if (!isObject(value)) throw refuse('not an object');
  const { lowers = [], upper, repoBlobUrl } = value;
  if (!Array.isArray(lowers)) throw refuse('lowers is no array');
  if (lowers.length > MAX_LOWERS) throw refuse(`${lowers.length} lowers, at most ${MAX_LOWERS} can be stacked`);
  lowers.forEach((lower, at) => {
    if (!isObject(lower)) throw refuse(`lowers[${at}] is no object`);
    for (const field of ['file', 'dir', 'digest']) {
      if (lower[field] !== undefined && typeof lower[field] !== 'string')
        throw refuse(`lowers[${at}].${field} is no text`);
      if (hasNul(lower[field])) throw refuse(`lowers[${at}].${field} has a zero byte`);
    }
    if (!lower.file && !lower.dir && !lower.digest) throw refuse(`lowers[${at}] has none of file, dir, digest`);
    if (lower.size !== undefined && !(Number.isSafeInteger(lower.size) && Number(lower.size) >= 0)) {
      throw refuse(`lowers[${at}].size is no size`);
    }
  });
  if (repoBlobUrl !== undefined && typeof repoBlobUrl !== 'string') throw refuse('repoBlobUrl is no text');
  if (upper !== undefined) {
    if (!isObject(upper)) throw refuse('upper is no object');
    // The tools write an upper of empty names for none.
    for (const field of ['data', 'index']) {
      if (upper[field] !== undefined && typeof upper[field] !== 'string') throw refuse(`upper.${field} is no text`);
      if (hasNul(upper[field])) throw refuse(`upper.${field} has a zero byte`);
    }
  }
  const config = { ...value, lowers } as DiskConfig;
  if (!config.upper?.data) {
    const { upper: _, ...rest } = config;
    return rest;
  }
  return config;
}

export async function readDiskConfig(path: string): Promise<DiskConfig> {
  // A pipe of that name must not wait for its other end.
  const file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
  try {
    const facts = await file.stat();
    if (!facts.isFile()) throw fail('DISK_CONFIG', { file: path, problem: 'not a regular file' });
    if (facts.size > MAX_BYTES) {
      throw fail('DISK_CONFIG', { file: path, problem: `${facts.size} bytes, at most ${MAX_BYTES} are read` });
    }
    return parseDiskConfig(await file.readFile('utf8'), path);
  } finally {
    await file.close();
  }
}

export function diskConfigText(config: DiskConfig): string {
  return `${JSON.stringify(config, undefined, 2)}\n`;
}

/** Where the lower layers are, bottom first. @param folder where relative names begin */
export function lowerPlaces(config: DiskConfig, folder: string, exists: (path: string) => boolean): LayerPlace[] {
  return config.lowers.map((lower, at) => {
    if (lower.file) return isAbsolute(lower.file) ? lower.file : resolve(folder, lower.file);
    const inStore = storeLayerOf(lower);
    if (inStore !== undefined) return inStore;
    if (lower.dir) {
      const inFolder = resolve(folder, lower.dir);
      const found = LAYER_NAMES.map((name) => join(inFolder, name)).find(exists);
      if (found !== undefined) return found;
      throw fail('DISK_LAYER_MISSING', { layer: at + 1, path: join(inFolder, LAYER_NAMES[0]) });
    }
    throw fail('DISK_LAYER_REMOTE', { layer: at + 1, digest: lower.digest });
  });
}

function hasNul(text: unknown): boolean {
  return typeof text === 'string' && text.includes('\0');
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
