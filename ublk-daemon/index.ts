export { type BlockMemory, type ByteSource, FileSource, MemorySource, shortRead } from './byte-source.ts';
export {
  type DiskConfig,
  diskConfigText,
  lowerPlaces,
  parseDiskConfig,
  readDiskConfig,
} from './config/config-v1.ts';
export type { PackWish } from './daemon/attached-disk.ts';
export { OPERATIONS, type OperationCount, type OperationCounts } from './daemon/counted-target.ts';
export { type AttachWish, type DaemonLog, DiskDaemon, type DiskView } from './daemon/disk-daemon.ts';
export { DiskTable } from './daemon/disk-table.ts';
export { WAY_NAMES, type WayName } from './daemon/way-out.ts';
export {
  type CreateDiskOptions,
  createDisk,
  type DiskFacts,
  diskFacts,
  type ImageFacts,
  type NamedSnapshot,
  type OpenDisk,
  type OpenDiskOptions,
  openDisk,
  PUBLISHED,
  readConfig,
  type UpperMode,
} from './disk-folder.ts';
export {
  createNamedDisk,
  type DiskOrigin,
  type DiskSummary,
  diskFolder,
  disksFolder,
  layersInStores,
  listDisks,
  type MergedDisk,
  mergeDisk,
  type NamedDiskOptions,
  openNamedDisk,
  removeDisk,
  restoreDisk,
} from './disks.ts';
export { ublkDaemonErrors } from './errors.ts';
export { exportQcow2, exportRaw } from './export-disk.ts';
export { type CommitOptions, type CommittedLayer, commitLayer } from './layer/commit.ts';
export {
  dumpLayer,
  type LayerDump,
  type LayerVerdict,
  type LsmtDump,
  verifyLayer,
  type ZfileDump,
} from './layer/inspect.ts';
export { openLayer, openLayerFile, unwrap } from './layer/layer-file.ts';
export { type MergeOptions, mergeLayers } from './layer/merge-layers.ts';
export { type LayerStack, openStack, stackLayers } from './layer/stack.ts';
export { type LayerPlace, type OpenStoreLayer, placeText, type StoreLayer } from './layer/store-layer.ts';
export type { LsmtHeader } from './lsmt/header.ts';
export { mergeIndexes } from './lsmt/merge-index.ts';
export { HOLE, Pieces, ZEROED } from './lsmt/pieces.ts';
export type { SealedLayer } from './lsmt/sealed-layer.ts';
export { IndexBuilder, SegmentIndex } from './lsmt/segment-index.ts';
export { type SealedUpper, StackedDisk } from './stacked-disk.ts';
export type { BlockTarget } from './target/block-target.ts';
export { type FileServer, type FileServerOptions, serveFile } from './target/file/file-server.ts';
export { type FileTarget, type FileTargetOptions, openFileTarget } from './target/file-target.ts';
export type { NbdExport } from './target/nbd/export.ts';
export { type NbdServer, type NbdServerOptions, serveNbd } from './target/nbd/server.ts';
export { endOwnDevices, type OwnDevice, ownDeviceObstacle, serveOwnDevice } from './target/own-device.ts';
export { errnoOf, TargetError } from './target/target-error.ts';
export {
  listUblk,
  recoverUblk,
  removeUblk,
  serveUblk,
  type UblkDevice,
  type UblkOptions,
} from './target/ublk/device.ts';
export { UBLK_FEATURES, type UblkFeature } from './target/ublk/features.ts';
export { type UblkSupport, ublkSupport } from './target/ublk/support.ts';
export type { Compacted } from './writable/upper.ts';
export type { ZfileOptions } from './zfile/zfile-writer.ts';
