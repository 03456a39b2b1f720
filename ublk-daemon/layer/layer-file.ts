/** Opens a sealed layer whatever it is wrapped in: the LSMT file itself, in a ZFile, in the tar of a registry. */
import { type ByteSource, FileSource } from '../byte-source.ts';
import { fail } from '../errors.ts';
import type { IndexMemory } from '../lsmt/index-memory.ts';
import { isLsmt, readSealedLayer, type SealedLayer } from '../lsmt/sealed-layer.ts';
import { isZfile, ZfileSource } from '../zfile/zfile-source.ts';
import { tarPayload } from './tar-blob.ts';

export interface Unwrapped {
  /** What is innermost. */
  readonly source: ByteSource;
  readonly isTar: boolean;
  readonly zfile: ZfileSource | undefined;
}

/** Closes nothing when it fails: `source` stays the caller's until then. */
export async function unwrap(source: ByteSource): Promise<Unwrapped> {
  const payload = await tarPayload(source);
  const inner = payload ?? source;
  if (!(await isZfile(inner))) return { source: inner, isTar: payload !== undefined, zfile: undefined };
  const zfile = await ZfileSource.open(inner);
  return { source: zfile, isTar: payload !== undefined, zfile };
}

/** @param memory for all indexes of the disk */
export async function openLayer(source: ByteSource, layerNumber = 0, memory?: IndexMemory): Promise<SealedLayer> {
  try {
    const { source: inner } = await unwrap(source);
    if (!(await isLsmt(inner))) throw fail('DISK_NOT_A_LAYER', { file: source.name });
    return await readSealedLayer(inner, layerNumber, memory);
  } catch (error) {
    await source.close();
    throw error;
  }
}

export async function openLayerFile(path: string, layerNumber = 0, memory?: IndexMemory): Promise<SealedLayer> {
  return openLayer(await FileSource.open(path), layerNumber, memory);
}
