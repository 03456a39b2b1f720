/** The native libraries that layers are read with: loading them takes some milliseconds, which others may have to spare. */
import { gunzipFallback, sha256Fallback } from '#linux';
import { igzipEngine } from './igzip.ts';

export function loadLibraries(): void {
  if (gunzipFallback() !== undefined) igzipEngine();
  sha256Fallback();
}
