export {
  type DiskConfig,
  diskConfigText,
  lowerFiles,
  parseDiskConfig,
  readDiskConfig,
} from './config/config-v1.ts';
export {
  type CreateDiskOptions,
  createDisk,
  type DiskFacts,
  type NamedSnapshot,
  type OpenDisk,
  openDisk,
  type UpperMode,
} from './disk-folder.ts';
export {
  createNamedDisk,
  type DiskOrigin,
  type DiskSummary,
  diskFolder,
  disksFolder,
  exportQcow2,
  exportRaw,
  listDisks,
  openNamedDisk,
  removeDisk,
  restoreDisk,
} from './disks.ts';
export { ublkDaemonErrors } from './errors.ts';
export { type CommitOptions, type CommittedLayer, commitLayer } from './layer/commit.ts';
export {
  dumpLayer,
  type LayerDump,
  type LayerVerdict,
  type LsmtDump,
  verifyLayer,
  type ZfileDump,
} from './layer/inspect.ts';
export { openLayer, openLayerFile } from './layer/layer-file.ts';
export { type LayerStack, openStack, stackLayers } from './layer/stack.ts';
export type { LsmtHeader } from './lsmt/header.ts';
export { mergeIndexes } from './lsmt/merge-index.ts';
export { HOLE, Pieces, ZEROED } from './lsmt/pieces.ts';
export type { SealedLayer } from './lsmt/sealed-layer.ts';
export { IndexBuilder, SegmentIndex } from './lsmt/segment-index.ts';
export { type SealedUpper, StackedDisk } from './stacked-disk.ts';
export type { BlockTarget } from './target/block-target.ts';
export { type FileTarget, type FileTargetOptions, openFileTarget } from './target/file-target.ts';
export type { NbdExport } from './target/nbd/export.ts';
export { type NbdServer, type NbdServerOptions, serveNbd } from './target/nbd/server.ts';
export { errnoOf, TargetError } from './target/target-error.ts';
export {
  listUblk,
  recoverUblk,
  removeUblk,
  serveUblk,
  type UblkDevice,
  type UblkOptions,
} from './target/ublk/device.ts';
export type { Compacted } from './writable/upper.ts';
export type { ZfileOptions } from './zfile/zfile-writer.ts';
