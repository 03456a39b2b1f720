/** `docker://`: an image in a registry. Manifest and config are read by `resolve`; layers stream when they are opened. */
import type { ImageReference } from './image-reference.ts';
import type { ImageSource, SourceOptions } from './image-source.ts';
import { RegistryClient } from './registry-client.ts';
import { type BlobAccess, resolveDocument } from './resolve-image.ts';

export function registrySource(description: string, image: ImageReference, options: SourceOptions): ImageSource {
  const client = new RegistryClient({
    registry: image.registry,
    credentials: options.credentials,
    insecure: options.insecure,
    signal: options.signal,
  });
  const { repository } = image;
  const access: BlobAccess = {
    where: description,
    read: async (descriptor, what) => {
      if (what === 'config') return client.getBlob(repository, descriptor.digest, descriptor.sizeBytes, options.signal);
      return (await client.getManifest(repository, descriptor.digest, options.signal)).bytes;
    },
    layerInput: async (descriptor) => ({
      kind: 'stream',
      open: (signal) => client.openBlob(repository, descriptor.digest, descriptor.sizeBytes, signal),
    }),
  };
  return {
    description,
    resolve: async () => {
      const reference = image.digest ?? image.tag ?? 'latest';
      const manifest = await client.getManifest(repository, reference, options.signal);
      return resolveDocument(access, manifest.bytes, manifest.mediaType, manifest.digest, options.platform);
    },
    close: () => client.close(),
  };
}
