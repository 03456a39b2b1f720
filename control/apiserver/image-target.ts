/**
 * Where changes of a sandbox may be packed to. Images of all projects are in one store, so the names that a sandbox's project may write begin with its path:
 * nobody replaces an image that others start from.
 */
import { isDsecError } from '#base';
import { type BlobStore, openAnyImage } from '#imagesvc';
import { fail } from '../errors.ts';

const MADE_BY_CONVERSION: ReadonlySet<string> = new Set(['base', 'disk']);

/** `name` is what the client says: `work:1` of project root/team is `root/team/work:1`. @throws API_IMAGE_NAME, API_IMAGE_TAKEN */
export async function packTarget(store: BlobStore, project: string, name: string): Promise<string> {
  const own = `${project}/`;
  const rest = name.startsWith(own) ? name.slice(own.length) : name;
  // With a slash it could be of a project below.
  if (rest.includes('/')) throw fail('API_IMAGE_NAME', { name: name.slice(0, 200), project });
  const target = `${own}${rest}`;
  try {
    const { kind } = await openAnyImage(store, target);
    if (MADE_BY_CONVERSION.has(kind)) throw fail('API_IMAGE_TAKEN', { name: target, kind });
  } catch (error) {
    if (!isDsecError(error, 'CATALOG_NOT_FOUND')) throw error;
  }
  return target;
}
