export * from './bytes.ts';
export { crc32cRaw } from './crc32c.ts';
export * from './digest.ts';
export * from './error.ts';
export * from './fail-point.ts';
export * from './process-entry.ts';
export * from './progress.ts';
export * from './spawn-worker.ts';
export * from './svg.ts';
