/** `dir:`: a folder of this machine as an image of one layer, with a minimal config. */
import { stat } from 'node:fs/promises';
import { basename, resolve } from 'node:path';
import type { ByteString } from '#base';
import { fail } from '../errors.ts';
import type { ImageSource, Platform } from './image-source.ts';
import { pathError } from './local-file.ts';
import { minimalConfig } from './manifest.ts';
import { hostPlatform } from './platform.ts';

export function folderSource(description: string, path: string, platform?: Platform, prefix?: ByteString): ImageSource {
  const folder = resolve(path);
  return {
    description,
    resolve: async () => {
      const stats = await stat(folder).catch((error: unknown) => {
        throw pathError(folder, error, 'folder');
      });
      if (!stats.isDirectory()) {
        throw fail('SOURCE_PATH', {
          path: folder,
          problem: 'not a folder',
          remedy: 'for the tar of a file system use tar:',
        });
      }
      return {
        config: minimalConfig(platform ?? hostPlatform()),
        manifestDigest: undefined,
        layers: [
          {
            label: `layer 1/1 ${basename(folder)}`,
            digest: undefined,
            sizeBytes: undefined,
            diffId: undefined,
            compression: 'plain',
            input: { kind: 'folder', path: folder },
            prefix,
          },
        ],
      };
    },
    close: async () => {},
  };
}
