/** `tar:`: the tar of one file system as an image of one layer, compressed or not, with a minimal config. */
import { basename, resolve } from 'node:path';
import type { ByteString } from '#base';
import { fail } from '../errors.ts';
import type { ImageSource, Platform } from './image-source.ts';
import { openRegular } from './local-file.ts';
import { minimalConfig } from './manifest.ts';
import { hostPlatform } from './platform.ts';

export function tarFileSource(
  description: string,
  path: string,
  platform?: Platform,
  prefix?: ByteString,
): ImageSource {
  const file = resolve(path);
  return {
    description,
    resolve: async () => {
      const { handle, sizeBytes } = await openRegular(file);
      await handle.close();
      if (sizeBytes === 0) throw fail('SOURCE_ARCHIVE', { path: file, reason: 'it is empty' });
      return {
        config: minimalConfig(platform ?? hostPlatform()),
        manifestDigest: undefined,
        layers: [
          {
            label: `layer 1/1 ${basename(file)}`,
            digest: undefined,
            sizeBytes,
            diffId: undefined,
            compression: 'detect',
            input: { kind: 'file', path: file, offset: 0, sizeBytes },
            prefix,
          },
        ],
      };
    },
    close: async () => {},
  };
}
