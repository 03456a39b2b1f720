export {
  CONVERTER_VERSION,
  type ConvertedImage,
  Converter,
  type ConvertImageOptions,
  type ConvertOptions,
  type ConvertStats,
  DEFAULT_COLLAPSE_LIMIT_BYTES,
  DEFAULT_INLINE_LIMIT_BYTES,
  MAX_INLINE_LIMIT_BYTES,
} from './convert.ts';
export * as codec from './erofs/codec.ts';
export { crc32cRaw, superblockChecksum } from './erofs/crc32c.ts';
export { directoryBytes, encodeDirectory } from './erofs/directory.ts';
export * as erofs from './erofs/layout.ts';
export { converterErrors } from './errors.ts';
export { CODEC_NAMES, type CodecName } from './layer/cluster-codec.ts';
export { type Compression, type DecompressOptions, decompress, detectCompression } from './layer/decompress.ts';
export type { Entry, EntryHandler, EntryKind } from './layer/entry.ts';
export { type FolderOptions, type FolderSummary, readFolder } from './layer/folder-reader.ts';
export { loadLibraries } from './layer/libraries.ts';
export { tarHeader, tarPadding } from './layer/tar-header.ts';
export { TarReader, type TarReaderOptions } from './layer/tar-reader.ts';
export type { BuiltBlob, BuiltLayer, LayerSink } from './layer-sink.ts';
export {
  formatImageReference,
  type ImageReference,
  normalizedName,
  parseImageReference,
} from './source/image-reference.ts';
export type {
  ImageSource,
  LayerInput,
  Platform,
  SourceImage,
  SourceLayer,
  SourceOptions,
} from './source/image-source.ts';
export {
  type ImageConfig,
  type Manifest,
  type ManifestDocument,
  minimalConfig,
  parseImageConfig,
  parseManifestDocument,
  type SourceDescriptor,
} from './source/manifest.ts';
export * as mediaTypes from './source/media-types.ts';
export { openSource } from './source/open-source.ts';
export { formatPlatform, hostPlatform, parsePlatform } from './source/platform.ts';
export { describeSource, parseSourceReference, type SourceReference } from './source/reference.ts';
export { type FetchedManifest, RegistryClient } from './source/registry-client.ts';
export type { RegistryClientOptions } from './source/registry-session.ts';
export { cutsWhereChainsPart, planGroups } from './tree/collapse-plan.ts';
/** undici, when it is first needed. */
export const loadHttpAgents = () => import('./source/undici-agents.ts');
