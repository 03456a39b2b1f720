/**
 * Has the node's layer server show a layer: our EROFS reader behind FUSE, for kernels whose own EROFS cannot read it. One
 * server a node, for layers of all stores; it reads the layer's files, which for a lazy store are the data server's.
 */

import { realpathSync } from 'node:fs';
import { join } from 'node:path';
import { hexOf } from '#base';
import { dataFolders, LAYERS } from '../data-server/data-folders.ts';
import { type DataServerOptions, ensureDataServer } from '../data-server/data-server.ts';
import type { PreparedLayer, ReaderTree } from '../mount/erofs-mount.ts';
import { nodeFolders } from '../mount/node-folders.ts';
import type { LayerFiles } from './layer-facts.ts';

/**
 * Of a lazy store it reads what the data server serves, also where a blob is whole in the cache: who reads through a mount that was
 * detached lazily is in no record, and the cache evicts what no record names.
 * @throws DATA_NOT_ROOT, DATA_FUSE_UNAVAILABLE, DATA_START_FAILED, DATA_CONTROL, DATA_TOO_MANY_LAYERS
 */
export async function showLayer(prepared: PreparedLayer, options: DataServerOptions): Promise<ReaderTree> {
  const { layer, meta, devices, verifiedOnRead, lazy } = prepared;
  const served = lazy && dataFolders(realpathSync(nodeFolders(options).runDir), lazy.server).mountPoint;
  const files: LayerFiles = {
    meta: { path: meta.path, digest: layer.meta.digest, sizeBytes: layer.meta.size, verifiedOnRead: false },
    devices: devices.map(({ path }, slot) => {
      const { digest, size } = layer.devices[slot]!.blob;
      return {
        path: served === undefined ? path : join(served, hexOf(digest)),
        digest,
        sizeBytes: size,
        verifiedOnRead,
      };
    }),
  };
  const server = await ensureDataServer(LAYERS, options);
  return { path: await server.addLayer(files), server: server.id };
}
