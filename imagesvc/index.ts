export {
  allBlobsOf,
  blobsOf,
  type ImageRow,
  type ImageSizes,
  type InspectedDisk,
  type InspectedImage,
  type InspectedLayer,
  inspectImage,
  keepBlobs,
  listImages,
  type NewDiskImage,
  type NewImage,
  openAnyImage,
  openDiskImage,
  openImage,
  publishDiskImage,
  publishImage,
  type RemovedImage,
  removeImage,
  resolveImage,
  sizesOf,
  type TaggedImage,
  tagImage,
} from './catalog/catalog.ts';
export { type HashedBlob, hashBlob } from './catalog/chunk-table.ts';
export {
  type Collected,
  type CollectOptions,
  collectGarbage,
  DEFAULT_GRACE_MS,
  reachable,
} from './catalog/collect-garbage.ts';
export { parseConfig, readConfig } from './catalog/config.ts';
export type { TransferOptions } from './catalog/depot.ts';
export {
  CHUNK_BYTES,
  type DiskParts,
  type ErofsLayer,
  type Image,
  type ImageKind,
  type LayerDevice,
  type OciConfig,
} from './catalog/image.ts';
export {
  buildManifest,
  CHUNK_DIGESTS_TYPE,
  CONFIG_TYPE,
  chunkDigestsSize,
  DISK_LAYER_TYPE,
  EROFS_TYPE,
  MANIFEST_TYPE,
  type ManifestParts,
  parseManifest,
} from './catalog/manifest.ts';
export { type Pulled, pullImage } from './catalog/pull.ts';
export { type Pushed, pushImage } from './catalog/push.ts';
export { damagedManifest, setAsideDamaged } from './catalog/set-aside.ts';
export {
  type BatchItem,
  type BatchOutcome,
  type Conversion,
  type ConvertToStoreOptions,
  convertBatch,
  convertToStore,
} from './convert/convert-to-store.ts';
export { dataServerId, LAYERS } from './data-server/data-folders.ts';
export {
  type DataReclaimReport,
  DataServer,
  type DataServerOptions,
  type DataServerPrograms,
  type DataServerRow,
  type DataServerStatus,
  ensureDataServer,
  findDataServer,
  listDataServers,
  reclaimDataServers,
  stopDataServers,
} from './data-server/data-server.ts';
export { blobFilesFor, type LazyOptions, lazyBlobFiles } from './data-server/lazy-blob-files.ts';
export { nativeUnavailable, serveNative } from './data-server/native-transport.ts';
export { connectFuse, serveRaw } from './data-server/raw-transport.ts';
export type { BlobReader, ServedBlob, ViewHandle } from './data-server/served-blob.ts';
export { imagesvcErrors } from './errors.ts';
export {
  type CollectedNode,
  type CollectNodeOptions,
  collectCaches,
  collectNode,
  type SweptCaches,
} from './gc/collect-node.ts';
export { mountedBlobs } from './gc/mounted-blobs.ts';
export { type BlobFiles, storeBlobFiles } from './mount/blob-files.ts';
export { openProven, type ProvenFile, recordProof } from './mount/blob-proof.ts';
export { BACKINGS, type Backing } from './mount/erofs-mount.ts';
export {
  listMounts,
  type Mounted,
  type MountOptions,
  mountImage,
  reclaimMounts,
  unmount,
} from './mount/image-mount.ts';
export type { IdMapping } from './mount/mapped-overlay.ts';
export type { LazyLayer, MountRecord } from './mount/mount-record.ts';
export type { ReclaimReport } from './mount/mount-table.ts';
export { type NodeFolders, nodeFolders } from './mount/node-folders.ts';
export { PublishedProofs } from './mount/published-proofs.ts';
export { type ExcludePattern, parseExcludePattern } from './pack-diff/exclude-pattern.ts';
export { type LowerView, openLowerView } from './pack-diff/lower-view.ts';
export { type PackDiffOptions, type PackedDiff, packDiff } from './pack-diff/pack-diff.ts';
export { RESIDUE_PATTERNS } from './pack-diff/residue-policy.ts';
export { readUpper, type UpperOptions } from './pack-diff/upper-reader.ts';
export { type ByteSource, FileSource, MemoryBytes, MemorySource, type MetaBytes } from './reader/byte-source.ts';
export { cat } from './reader/cat.ts';
export { type Aspect, type Change, changeJson, changeText, type DiffOptions, diffTrees } from './reader/diff-trees.ts';
export { type Dump, type DumpTarget, dump, dumpText } from './reader/dump.ts';
export { ErofsReader } from './reader/erofs-reader.ts';
export { exportTar } from './reader/export-tar.ts';
export { jsonText } from './reader/format-entry.ts';
export { ImageTree, openTree, type PlacedExtent, type TreeStat, type WalkItem } from './reader/image-tree.ts';
export type { Inode, Kind } from './reader/inode.ts';
export { type ListOptions, list } from './reader/list.ts';
export { type OpenLayer, openLayer, openLayerFiles } from './reader/open-layer.ts';
export { type PathStat, statJson, statPath, statText } from './reader/stat.ts';
export { TreeNode } from './reader/tree-node.ts';
export { ChunkCache, VerifiedBlob } from './reader/verified-blob.ts';
export { type VerifyOptions, type VerifyProblem, type VerifyReport, verifyImage } from './reader/verify.ts';
export { verifyStructure } from './reader/verify-structure.ts';
export type { ImageService, ImageServiceOptions } from './server/app.ts';
export type { App as HttpApp } from './server/app-types.ts';
export {
  type ClientOptions,
  type ConvertWish,
  convertRemotely,
  ImageServiceClient,
} from './server/client.ts';
export { compileOnFirstUse } from './server/compile-on-first-use.ts';
export { docsPage } from './server/docs-page.ts';
export { dsecErrorOf, errorAnswer } from './server/error-answer.ts';
export type { ConvertRequest, JobResult, JobState, JobView, PackDiffRequest } from './server/jobs/job.ts';
export { listen as listenHttp, parseListenAddress } from './server/listen.ts';
export { Metrics } from './server/metrics.ts';
export { type ServeOptions, type Serving, serveImages } from './server/serve.ts';
export { type Caller, ROLES, type Role, Tokens } from './server/tokens.ts';
export { blobMapSvg, heatText, percent } from './stats/blob-map.ts';
export { type BlobHeat, type DirectoryHeat, type HeatBytes, type ImageStats, imageStats } from './stats/image-stats.ts';
export type { BlobStore, Descriptor, Hold, Ref, Staging } from './store/blob-store.ts';
export { RetryAllowance, type RetryOptions, retryCall } from './store/decorators/retry-call.ts';
export {
  FAULTS,
  type Fault,
  type FaultOptions,
  type FaultySource,
  withFaults,
} from './store/decorators/with-faults.ts';
export { type HedgeOptions, withHedge } from './store/decorators/with-hedge.ts';
export { type LimitedSource, type LimitOptions, withLimit } from './store/decorators/with-limit.ts';
export {
  LATENCY_BOUNDS_MS,
  type MeteredSource,
  type ReadCounts,
  type SourceMetrics,
  withMetrics,
} from './store/decorators/with-metrics.ts';
export { withRetry } from './store/decorators/with-retry.ts';
export { type ImageName, isImageName, parseImageName } from './store/image-name.ts';
export { MemoryStore } from './store/memory-store.ts';
export { defaultStoreUrl, openStore } from './store/open-store.ts';
export { type RemoteSourceOptions, remoteRangeSource, storeRangeSource } from './store/store-range-source.ts';
export { type SyncedImages, type SyncOptions, syncImages } from './sync/sync-images.ts';
export { wasSynced } from './sync/synced-images.ts';
export { type TraceCoverage, traceCoverage, tracedNames } from './sync/trace-coverage.ts';
export { joinRanges, mergeTraces } from './trace/merge-traces.ts';
export { type PlannedRange, planPrefetch } from './trace/prefetch-plan.ts';
export {
  checkSize as checkTraceSize,
  checkTraceOf,
  formatTrace,
  MAX_TRACE_BYTES,
  parseTrace,
  type Trace,
  tracedBytes,
  traceFrom,
  traceJson,
} from './trace/trace.ts';
export { type RecordedRead, type RecordedReads, traceFromReads } from './trace/trace-from-reads.ts';
export { TracePrefetch } from './trace/trace-prefetch.ts';
export {
  checkTraceName,
  type KeptTrace,
  keepTrace,
  keptTraces,
  listTraces,
  mergedTrace,
  readTrace,
  removeTrace,
  type TraceRow,
  traceOf,
} from './trace/trace-store.ts';
