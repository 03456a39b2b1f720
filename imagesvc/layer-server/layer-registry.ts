/**
 * What the servers of one mount know of its layers, on disk, so that each knows what its predecessor knew and gives every
 * inode the same number: a file `<number>-<hex>.json` a layer.
 */
import { mkdirSync, readdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, hexOf } from '#base';
import { fail } from '../errors.ts';
import { type LayerFiles, MAX_LAYER_NUMBER, type RegisteredLayer } from './layer-facts.ts';

export class LayerRegistry {
  readonly #folder: string;
  readonly #layers = new Map<Digest, RegisteredLayer>();

  constructor(folder: string) {
    this.#folder = folder;
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    for (const name of readdirSync(folder)) {
      if (!/^\d+-[0-9a-f]{64}\.json$/.test(name)) continue;
      const layer = JSON.parse(readFileSync(join(folder, name), 'utf8')) as RegisteredLayer;
      this.#layers.set(layer.meta.digest, layer);
    }
  }

  get layers(): RegisteredLayer[] {
    return [...this.#layers.values()].sort((a, b) => a.number - b.number);
  }

  /** Of a layer that is known the files may have moved. @throws DATA_TOO_MANY_LAYERS */
  add(files: LayerFiles): RegisteredLayer {
    const known = this.#layers.get(files.meta.digest);
    let number = known?.number ?? 1;
    if (known === undefined) for (const layer of this.#layers.values()) number = Math.max(number, layer.number + 1);
    if (number > MAX_LAYER_NUMBER) throw fail('DATA_TOO_MANY_LAYERS', { limit: MAX_LAYER_NUMBER });
    const layer: RegisteredLayer = { number, meta: files.meta, devices: files.devices };
    const path = join(this.#folder, `${number}-${hexOf(files.meta.digest)}.json`);
    writeFileSync(`${path}.tmp`, JSON.stringify(layer), { mode: 0o600 });
    renameSync(`${path}.tmp`, path);
    this.#layers.set(files.meta.digest, layer);
    return layer;
  }
}
