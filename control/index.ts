export { createDiskFromImage } from './disk-images/disk-from-image.ts';
export { type PublishOptions, publishPacked, publishPoint } from './disk-images/publish-disk.ts';
export { type DiskLayerOptions, type StoreLayerOpener, storeLayerOpener } from './disk-layers.ts';
