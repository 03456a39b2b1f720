/**
 * `docker-archive:`: what `docker save` writes. `manifest.json` lists images with their tags, config and layers by the
 * names of members. Layers are uncompressed or gzip; where two are equal, old versions write the second as a symlink.
 * Newer versions lay the same members out as an OCI layout too; `manifest.json` is there all the same and decides.
 */
import { digestFromHex } from '#base';
import { fail } from '../errors.ts';
import { ArchiveFile, TemporaryFolder } from './archive-file.ts';
import { normalizedName } from './image-reference.ts';
import type { ImageSource, Platform, SourceImage, SourceLayer, SourceOptions } from './image-source.ts';
import { JsonFields } from './json-fields.ts';
import { MAX_DOCUMENT_BYTES, parseImageConfig } from './manifest.ts';
import type { LocatedFile } from './oci-layout.ts';
import { list, quote } from './quote.ts';
import { checkConfig, layerLabel, verifyBytes } from './resolve-image.ts';

interface ArchivedImage {
  readonly config: string;
  readonly tags: readonly string[];
  readonly layers: readonly string[];
}

export function dockerArchiveSource(
  description: string,
  path: string,
  choice: { name: string | undefined; position: number | undefined },
  options: SourceOptions,
): ImageSource {
  const temporary = new TemporaryFolder(options.workDir);
  let opened: Promise<ArchiveFile> | undefined;
  return {
    description,
    resolve: async () => {
      opened ??= ArchiveFile.open(path, temporary, options.signal);
      const archive = await opened;
      const images = await readImages(archive);
      return resolveImage(archive, description, choose(description, path, images, choice), options.platform);
    },
    close: () => temporary.remove(),
  };
}

async function readImages(archive: ArchiveFile): Promise<ArchivedImage[]> {
  const file = await archive.locate('manifest.json');
  if (file === undefined) {
    const layout = await archive.locate('oci-layout');
    throw fail('SOURCE_ARCHIVE', {
      path: archive.root,
      reason: layout
        ? 'it has no manifest.json, but it is an OCI layout: use oci-archive:'
        : 'it has no manifest.json; for the tar of one file system use tar:',
    });
  }
  const root = JsonFields.parse(await archive.read(file, MAX_DOCUMENT_BYTES), archive.pathOf('manifest.json'));
  return root.array().map((item) => {
    const tags = item.get('RepoTags');
    const layers = item.get('Layers');
    return {
      config: item.get('Config').string(),
      tags: tags.present ? tags.array().map((tag) => tag.string()) : [],
      layers: layers.present ? layers.array(4096).map((layer) => layer.string()) : [],
    };
  });
}

function choose(
  where: string,
  path: string,
  images: readonly ArchivedImage[],
  choice: { name: string | undefined; position: number | undefined },
): ArchivedImage {
  const names = images.flatMap((image, i) => (image.tags.length > 0 ? image.tags : [`@${i}`]));
  if (choice.position !== undefined || choice.name !== undefined) {
    const wanted = choice.name === undefined ? undefined : normalizedName(choice.name);
    const found =
      choice.position !== undefined
        ? images[choice.position]
        : images.find((image) => image.tags.some((tag) => tag === choice.name || normalizedName(tag) === wanted));
    if (found === undefined) {
      throw fail('SOURCE_NAME_MISSING', {
        where: `docker-archive:${path}`,
        name: quote(choice.name ?? `@${choice.position}`),
        names: list(names),
      });
    }
    return found;
  }
  if (images.length === 0) throw fail('SOURCE_ARCHIVE', { path, reason: 'its manifest.json names no image' });
  if (images.length > 1) {
    throw fail('SOURCE_AMBIGUOUS', { where, names: list(names), example: `${where}:${names[0]}` });
  }
  return images[0]!;
}

async function resolveImage(
  archive: ArchiveFile,
  where: string,
  image: ArchivedImage,
  platform: Platform | undefined,
): Promise<SourceImage> {
  const config = await archive.read(await find(archive, where, image.config, 'the config'), MAX_DOCUMENT_BYTES);
  // Docker names the config after its digest, in both of its forms.
  const hex = /^(?:blobs\/sha256\/([0-9a-f]{64})|([0-9a-f]{64})\.json)$/.exec(image.config);
  if (hex !== null) verifyBytes(where, `config ${image.config}`, config, undefined, digestFromHex(hex[1] ?? hex[2]!));
  const parsed = parseImageConfig(config, archive.pathOf(image.config));
  checkConfig(where, parsed, image.layers.length, platform);

  const layers: SourceLayer[] = [];
  for (const [i, name] of image.layers.entries()) {
    const label = layerLabel(i, image.layers.length, parsed.diffIds[i]!);
    const file = await find(archive, where, name, label);
    layers.push({
      label,
      digest: undefined,
      sizeBytes: file.sizeBytes,
      diffId: parsed.diffIds[i],
      compression: 'detect',
      input: { kind: 'file', path: file.path, offset: file.offset, sizeBytes: file.sizeBytes },
    });
  }
  return { config, manifestDigest: undefined, layers };
}

async function find(archive: ArchiveFile, where: string, name: string, what: string): Promise<LocatedFile> {
  const file = await archive.locate(name);
  if (file === undefined) {
    throw fail('SOURCE_BLOB_MISSING', { where, what, digest: quote(name), path: archive.pathOf(name) });
  }
  return file;
}
