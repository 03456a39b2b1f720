/** Everything of one file system onto its disk, without holding up this thread. */
import { closeSync, openSync } from 'node:fs';
import { nodePath } from '#base';
import { type Call, callInPool } from './libc.ts';

const SYNCFS: Call = { name: 'syncfs', result: 'int', args: ['int'] };

/** Of the file system that `path` (text) lies on. False when the disk has failed. */
export async function syncFileSystem(path: string): Promise<boolean> {
  const fd = openSync(nodePath(path), 'r');
  try {
    return (await callInPool(SYNCFS, [fd])) === 0;
  } finally {
    closeSync(fd);
  }
}
