/**
 * An OCI image layout: `oci-layout`, `index.json`, `blobs/sha256/HEX`, in a folder or in an archive. Which of the two is
 * the business of `LayoutFiles`; here an entry of the index is chosen by name and resolved.
 *
 * Names are the annotation `org.opencontainers.image.ref.name`. What it holds differs by tool: a tag (skopeo, umoci) or
 * a whole name (podman, buildah), and containerd keeps the whole name in an annotation of its own.
 */
import { stat } from 'node:fs/promises';
import { join, resolve } from 'node:path';
import { hexOf } from '#base';
import { fail } from '../errors.ts';
import { normalizedName, parseImageReference } from './image-reference.ts';
import type { ImageSource, LayerInput, Platform, SourceImage } from './image-source.ts';
import { JsonFields } from './json-fields.ts';
import { pathError, readWhole, regularSize } from './local-file.ts';
import { MAX_DOCUMENT_BYTES, parseDescriptor, type SourceDescriptor } from './manifest.ts';
import { list, quote } from './quote.ts';
import { type BlobAccess, foreignNote, readVerified, resolveDescriptors, resolveDocument } from './resolve-image.ts';

/** A member of a layout, where its bytes are on this machine. */
export interface LocatedFile {
  readonly path: string;
  readonly offset: number;
  readonly sizeBytes: number;
}

/** The files of a layout, by their names in it: `index.json`, `blobs/sha256/…`. */
export interface LayoutFiles {
  /** Folder or archive, for messages. */
  readonly root: string;
  /** Undefined when there is no such file. */
  locate(name: string): Promise<LocatedFile | undefined>;
  /** The whole file. */
  read(file: LocatedFile, limit: number): Promise<Buffer>;
  /** Where a file would be, for messages. */
  pathOf(name: string): string;
}

export function ociLayoutSource(
  description: string,
  path: string,
  name: string | undefined,
  platform?: Platform,
): ImageSource {
  const folder = resolve(path);
  return {
    description,
    resolve: async () => {
      await stat(folder).catch((error: unknown) => {
        throw pathError(folder, error, 'folder');
      });
      return resolveLayout(folderFiles(folder), description, name, platform);
    },
    close: async () => {},
  };
}

/** @throws SOURCE_NOT_A_LAYOUT, SOURCE_NAME_MISSING, SOURCE_AMBIGUOUS and what resolveDescriptors throws */
export async function resolveLayout(
  files: LayoutFiles,
  where: string,
  name: string | undefined,
  platform: Platform | undefined,
): Promise<SourceImage> {
  await checkLayoutFile(files);
  const indexPath = files.pathOf('index.json');
  const index = JsonFields.parse(await readNamed(files, 'index.json'), indexPath);
  if (index.get('schemaVersion').size() !== 2) throw index.get('schemaVersion').problem('must be 2');
  const entries = index.get('manifests').array().map(parseDescriptor);
  const candidates = unique(name === undefined ? onlyImage(where, entries) : named(where, entries, name));
  const access = layoutAccess(files, where);
  if (candidates.length === 1) {
    // The user's choice is made: an image of another platform is taken unless --platform forbids it.
    const only = candidates[0]!;
    return resolveDocument(access, await readVerified(access, only, 'manifest'), only.mediaType, only.digest, platform);
  }
  return resolveDescriptors(access, candidates, platform);
}

export function blobName(descriptor: SourceDescriptor): string {
  return `blobs/sha256/${hexOf(descriptor.digest)}`;
}

function layoutAccess(files: LayoutFiles, where: string): BlobAccess {
  const find = async (descriptor: SourceDescriptor, what: string): Promise<LocatedFile> => {
    const name = blobName(descriptor);
    const file = await files.locate(name);
    if (file === undefined) {
      throw fail('SOURCE_BLOB_MISSING', {
        where,
        what: `${what}${foreignNote(descriptor)}`,
        digest: descriptor.digest,
        path: files.pathOf(name),
      });
    }
    if (file.sizeBytes !== descriptor.sizeBytes) {
      throw fail('SOURCE_SIZE_MISMATCH', {
        where,
        what: `${what} ${descriptor.digest} (${files.pathOf(name)})`,
        actual: file.sizeBytes,
        expected: descriptor.sizeBytes,
      });
    }
    return file;
  };
  return {
    where,
    read: async (descriptor, what) => files.read(await find(descriptor, what), descriptor.sizeBytes),
    layerInput: async (descriptor, label): Promise<LayerInput> => {
      const file = await find(descriptor, `${label}: blob`);
      return { kind: 'file', path: file.path, offset: file.offset, sizeBytes: file.sizeBytes };
    },
  };
}

function folderFiles(root: string): LayoutFiles {
  const pathOf = (name: string) => join(root, name);
  return {
    root,
    pathOf,
    locate: async (name) => {
      const sizeBytes = await regularSize(pathOf(name));
      return sizeBytes === undefined ? undefined : { path: pathOf(name), offset: 0, sizeBytes };
    },
    read: (file, limit) => readWhole(file.path, limit),
  };
}

async function checkLayoutFile(files: LayoutFiles): Promise<void> {
  const where = files.root;
  const marker = await files.locate('oci-layout');
  if (marker === undefined) {
    const docker = await files.locate('manifest.json');
    throw fail('SOURCE_NOT_A_LAYOUT', {
      where,
      problem: 'it has no file oci-layout',
      remedy: docker
        ? 'it looks like an archive of docker save: use docker-archive:FILE'
        : 'check the path; for a plain folder use dir:, for a tar of one file system tar:',
    });
  }
  const root = JsonFields.parse(await files.read(marker, MAX_DOCUMENT_BYTES), files.pathOf('oci-layout'));
  const version = root.get('imageLayoutVersion').string();
  if (!/^1\.\d+\.\d+/.test(version)) {
    throw fail('SOURCE_NOT_A_LAYOUT', {
      where,
      problem: `its layout version is ${quote(version)}`,
      remedy: 'only version 1 is known; write it again with a current tool',
    });
  }
}

async function readNamed(files: LayoutFiles, name: string): Promise<Buffer> {
  const file = await files.locate(name);
  if (file === undefined) {
    throw fail('SOURCE_NOT_A_LAYOUT', {
      where: files.root,
      problem: `it has no file ${name}`,
      remedy: 'the layout is incomplete; write it again',
    });
  }
  if (file.sizeBytes > MAX_DOCUMENT_BYTES) {
    throw fail('SOURCE_TOO_LARGE', {
      where: files.root,
      what: name,
      actual: file.sizeBytes,
      limit: MAX_DOCUMENT_BYTES,
    });
  }
  return files.read(file, MAX_DOCUMENT_BYTES);
}

function refName(entry: SourceDescriptor): string | undefined {
  return (
    entry.annotations.get('org.opencontainers.image.ref.name') ?? entry.annotations.get('io.containerd.image.name')
  );
}

/** All entries, when they stand for one image: one entry, or one name (or none) for several platforms. */
function onlyImage(where: string, entries: readonly SourceDescriptor[]): readonly SourceDescriptor[] {
  if (entries.length === 0) {
    throw fail('SOURCE_NOT_A_LAYOUT', {
      where,
      problem: 'its index names no image',
      remedy: 'put one in: skopeo copy SOURCE oci:DIR:NAME',
    });
  }
  const names = new Set(entries.map(refName));
  if (names.size === 1 && (entries.length === 1 || distinctPlatforms(entries))) return entries;
  const shown = [...names].map((name) => (name === undefined ? '(one without a name)' : name));
  const example = [...names].find((name) => name !== undefined);
  if (names.size === 1 && unique(entries).length === 1) return entries;
  throw fail('SOURCE_AMBIGUOUS', {
    where,
    names:
      names.size === 1 ? `${entries.length} ${example ? `named ${example}` : 'without a name'}` : list(shown.sort()),
    example: example === undefined ? 'give them names with skopeo copy' : `${where}:${example}`,
  });
}

/** Entries whose name is `name`: exactly, else as a whole name, else by the tag at its end where that is one image's. */
function named(where: string, entries: readonly SourceDescriptor[], name: string): readonly SourceDescriptor[] {
  const annotation = (key: string) => (entry: SourceDescriptor) => entry.annotations.get(key);
  const ref = annotation('org.opencontainers.image.ref.name');
  const full = annotation('io.containerd.image.name');
  const wanted = normalizedName(name);
  const same = (text: string | undefined) =>
    text !== undefined && wanted !== undefined && normalizedName(text) === wanted;
  const rules: ((entry: SourceDescriptor) => boolean)[] = [
    (entry) => ref(entry) === name,
    (entry) => full(entry) === name,
    (entry) => same(full(entry)) || (ref(entry)?.includes('/') === true && same(ref(entry))),
    (entry) => tagOf(ref(entry)) === name || tagOf(full(entry)) === name,
  ];
  for (const rule of rules) {
    const found = entries.filter(rule);
    if (found.length === 0) continue;
    if (unique(found).length === 1 || (new Set(found.map(refName)).size === 1 && distinctPlatforms(found)))
      return found;
    throw fail('SOURCE_AMBIGUOUS', {
      where,
      names: list(found.map((entry) => `${refName(entry)} (${entry.digest})`)),
      example: 'use a name that only one image has',
    });
  }
  const names = [...new Set(entries.map(refName))].filter((text) => text !== undefined);
  throw fail('SOURCE_NAME_MISSING', { where, name: quote(name), names: list(names.sort()) });
}

function tagOf(text: string | undefined): string | undefined {
  if (text === undefined || !text.includes('/')) return undefined;
  try {
    return parseImageReference(text).tag;
  } catch {
    return undefined;
  }
}

function distinctPlatforms(entries: readonly SourceDescriptor[]): boolean {
  const keys = entries.map((entry) => entry.platform && JSON.stringify(entry.platform));
  return keys.every((key) => key !== undefined) && new Set(keys).size === keys.length;
}

function unique(entries: readonly SourceDescriptor[]): SourceDescriptor[] {
  const byDigest = new Map<string, SourceDescriptor>();
  for (const entry of entries) if (!byDigest.has(entry.digest)) byDigest.set(entry.digest, entry);
  return [...byDigest.values()];
}
