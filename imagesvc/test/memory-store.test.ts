import type { Digest } from '#base';
import { MemoryStore } from '../store/memory-store.ts';
import { storeConformance } from './store-conformance.ts';

storeConformance('memory', async () => {
  const store = new MemoryStore();
  return {
    store,
    again: async () => store,
    damage: async (digest: Digest, bytes: Buffer) => store.damage(digest, bytes),
    close: async () => {},
  };
});
