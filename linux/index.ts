export * as bpf from './bpf.ts';
export * from './capability.ts';
export { isDeadSocket } from './dead-socket.ts';
export { makeEpoll, unwatch, waitForTags, watchOnce } from './epoll.ts';
export * from './errors.ts';
export { linuxErrors } from './errors.ts';
export { makeEventFd, raiseEventFd } from './eventfd.ts';
export { exitNow } from './exit-now.ts';
export { atLeast, type DetectOptions, detect, type Feature, kernelHas } from './features.ts';
export * as fuse from './fuse/index.ts';
export {
  Gunzip,
  type GunzipFile,
  type GunzipPause,
  type GunzipRings,
  gunzipFallback,
  gunzipRings,
} from './gunzip.ts';
export { mappedClone, withFileSystemIds } from './id-mapping.ts';
export { becomeIoFlusher } from './io-flusher.ts';
export * from './io-uring.ts';
export { type ModuleState, moduleState } from './kernel-module.ts';
export type { BytePath } from './libc.ts';
export { type BlockZstd, blockZstd, type ZstdLibrary, zstdLibrary } from './libzstd.ts';
export * from './lock.ts';
export * from './loop.ts';
export { makeMemoryFile, sealMemoryFile } from './memfd.ts';
export { addressOf, type KernelMapping, type Mapping, mapFile, mapForKernel, mapPages, viewPages } from './memory.ts';
export * from './mount.ts';
export * from './mount-info.ts';
export { MountWatch } from './mount-watch.ts';
export * as netlink from './netlink.ts';
export { inNetworkNamespace, networkNamespaceOf } from './network-namespace.ts';
export { beginWriteback, cachedBytes, dropCached, readAhead } from './page-cache.ts';
export { peerOf } from './peer.ts';
export { takeDescriptor } from './pidfd.ts';
export * from './pipe.ts';
export * from './process.ts';
export { adviseProcess, type MemoryRange, mappingsOf } from './process-memory.ts';
export { limitProject, type ProjectUsage, projectUsage, setProject } from './project-quota.ts';
export { readNow } from './read-now.ts';
export { isInMemory, ReadyReads } from './ready-reads.ts';
export { replaceFile, syncFolder } from './replace-file.ts';
export { coreSchedulingMissing, isScheduledWhenIdle, scheduleWhenIdle, takeCoreAlone } from './scheduling.ts';
export { receiveNow, sendNow } from './send-now.ts';
export {
  type BlobDigests,
  type BlobMark,
  type BlobSha256,
  createBlobSha256,
  createSha256,
  type Due,
  type Sha256,
  sha256Fallback,
  updatePair,
} from './sha256.ts';
export * from './special.ts';
export { type SwapSpace, swapSpace } from './swap.ts';
export { syncFileSystem } from './sync-file-system.ts';
export { openSystemLibrary } from './system-library.ts';
export { giveTap, makeTap } from './tap.ts';
export { Residency, readTo, writeFrom } from './transfer.ts';
export * from './xattr.ts';
