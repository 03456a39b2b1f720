/** FUSE as the kernel speaks it on /dev/fuse; shown to the other folders as `fuse`. */
export * from './connect.ts';
export * from './fuse-protocol.ts';
export * from './read-request.ts';
export * from './send-reply.ts';
export * from './writable-protocol.ts';
