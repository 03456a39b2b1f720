/** A process of its own for the mount tests: does what its argument says, as JSON, and prints the result as JSON. */
import { isDsecError } from '#base';
import type { ErofsLayer } from '../catalog/image.ts';
import { mountImage, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';

interface Order {
  readonly action: 'mount' | 'unmount';
  readonly blobs: string;
  readonly runDir: string;
  readonly cacheDir: string;
  readonly layers?: readonly ErofsLayer[];
  readonly target: string;
  readonly upper?: string;
  readonly backing?: 'auto' | 'file' | 'loop';
  readonly overlayApi?: 'auto' | 'mount2';
}

const { action, blobs, ...order } = JSON.parse(process.argv[2]!) as Order;
const store = {
  url: `file://${blobs}`,
  localPath: (digest) => `${blobs}/${digest.slice('sha256:'.length)}`,
} as Partial<BlobStore> as BlobStore;
try {
  const result = action === 'mount' ? await mountImage({ ...order, store }) : await unmount(order.target, order);
  console.log(JSON.stringify(result));
} catch (error) {
  console.log(JSON.stringify({ error: isDsecError(error) ? error.code : String(error) }));
  process.exitCode = 1;
}
