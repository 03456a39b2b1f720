// A process that writes to a store, for tests of many processes and of killed ones: node store-writer.mjs MODE STORE [SEED]
import { register } from 'tsx/esm/api';

register();
await import('./store-writer.ts');
