/** Where changes of a sandbox may be packed to: whoever may do that to his own sandbox shall not replace the images that all others start from. */

import { isDsecError } from '#base';
import { type BlobStore, openAnyImage } from '#imagesvc';
import { fail } from '../errors.ts';

const MADE_BY_CONVERSION: ReadonlySet<string> = new Set(['base', 'disk']);

/** @throws API_IMAGE_TAKEN */
export async function checkPackTarget(store: BlobStore, name: string): Promise<void> {
  try {
    const { kind } = await openAnyImage(store, name);
    if (MADE_BY_CONVERSION.has(kind)) throw fail('API_IMAGE_TAKEN', { name, kind });
  } catch (error) {
    if (!isDsecError(error, 'CATALOG_NOT_FOUND')) throw error;
  }
}
