/** Who on this node keeps an image's blobs in use, whatever names say: for people who removed it and wonder what was freed. */
import type { Digest } from '#base';
import { type BlobStore, listMounts, reachable } from '#imagesvc';
import { listSandboxes, type SandboxRecord } from '#runtime';
import { layersInStores } from '#ublk-daemon';

/** A line each: `sandbox work runs on it`, `it is mounted at /mnt`. The image is still in the store. */
export async function usersOfImage(store: BlobStore, manifest: Digest): Promise<string[]> {
  const sandboxes = listSandboxes();
  const mounts = (await listMounts()).filter((mount) => mount.state === 'mounted');
  const disks = await layersInStores();
  if (sandboxes.length === 0 && mounts.length === 0 && disks.length === 0) return [];
  const blobs = await reachable(store, manifest).catch(() => new Set([manifest]));
  const users: string[] = [];
  for (const sandbox of sandboxes) {
    const images = imagesOf(sandbox);
    if (images.includes(manifest)) {
      users.push(`sandbox ${sandbox.name} ${sandbox.state === 'kept' ? 'ran' : 'runs'} on it`);
    } else if (await anyLeadsTo(store, images, blobs)) users.push(`sandbox ${sandbox.name} shares blobs with it`);
  }
  for (const { image, layers, target } of mounts) {
    // What a sandbox mounts is told of already.
    if (sandboxes.some(({ name }) => target.endsWith(`/sandboxes/${name}/root`))) continue;
    if (image?.manifest === manifest) users.push(`it is mounted at ${target}`);
    else if (layers.some((layer) => blobs.has(layer))) users.push(`the mount at ${target} shares layers with it`);
  }
  for (const { disk, layers } of disks) {
    if (layers.some(({ digest }) => blobs.has(digest))) users.push(`disk ${disk} lies on layers of it`);
  }
  return users;
}

function imagesOf({ base, workspace, toolkits }: SandboxRecord): Digest[] {
  return [base, workspace, ...toolkits].flatMap((image) => (image === undefined ? [] : [image.digest]));
}

async function anyLeadsTo(store: BlobStore, images: readonly Digest[], blobs: ReadonlySet<Digest>): Promise<boolean> {
  for (const image of images) {
    // It may be of another store.
    const needed = await reachable(store, image).catch(() => new Set<Digest>());
    for (const digest of needed) if (blobs.has(digest)) return true;
  }
  return false;
}
