/** From what the user wrote to a source. Opening costs nothing but parsing: `resolve` is the first to read. */

import { fail } from '../errors.ts';
import { dockerArchiveSource } from './docker-archive.ts';
import { folderSource } from './folder.ts';
import type { ImageSource, SourceOptions } from './image-source.ts';
import { ociArchiveSource } from './oci-archive.ts';
import { ociLayoutSource } from './oci-layout.ts';
import { describeSource, parseSourceReference } from './reference.ts';
import { registrySource } from './registry.ts';
import { tarFileSource } from './tar-file.ts';
import { treePrefix } from './tree-prefix.ts';

/** @throws SOURCE_SCHEME, SOURCE_REFERENCE, SOURCE_CREDENTIALS, SOURCE_PREFIX */
export async function openSource(reference: string, options: SourceOptions): Promise<ImageSource> {
  const parsed = parseSourceReference(reference);
  const description = describeSource(parsed);
  const prefix = options.prefix === undefined ? undefined : treePrefix(options.prefix);
  if (prefix !== undefined && parsed.kind !== 'tar' && parsed.kind !== 'dir') {
    throw fail('SOURCE_PREFIX', {
      prefix: options.prefix,
      problem: `${description} is an image, which has its own root`,
    });
  }
  switch (parsed.kind) {
    case 'oci':
      return ociLayoutSource(description, parsed.path, parsed.name, options.platform);
    case 'oci-archive':
      return ociArchiveSource(description, parsed.path, parsed.name, options);
    case 'docker-archive':
      return dockerArchiveSource(description, parsed.path, parsed, options);
    case 'tar':
      return tarFileSource(description, parsed.path, options.platform, prefix);
    case 'dir':
      return folderSource(description, parsed.path, options.platform, prefix);
    case 'docker':
      return registrySource(description, parsed.image, options);
  }
}
