/** `oci-archive:`: an OCI image layout in a tar file. */
import { ArchiveFile, TemporaryFolder } from './archive-file.ts';
import type { ImageSource, SourceOptions } from './image-source.ts';
import { resolveLayout } from './oci-layout.ts';

export function ociArchiveSource(
  description: string,
  path: string,
  name: string | undefined,
  options: SourceOptions,
): ImageSource {
  const temporary = new TemporaryFolder(options.workDir);
  let opened: Promise<ArchiveFile> | undefined;
  return {
    description,
    resolve: async () => {
      opened ??= ArchiveFile.open(path, temporary, options.signal);
      const archive = await opened;
      return resolveLayout(archive, description, name, options.platform);
    },
    close: () => temporary.remove(),
  };
}
