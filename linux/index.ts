export * from './errors.ts';
export type { BytePath } from './libc.ts';
export * from './lock.ts';
export * from './loop.ts';
export * from './mount.ts';
export * from './mount-info.ts';
export * from './process.ts';
export * from './special.ts';
export * from './xattr.ts';
