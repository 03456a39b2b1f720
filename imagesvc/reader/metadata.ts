/**
 * The metadata of one image with its superblock: what the parts of the reader share. Every access is bounds-checked
 * here, and a failure names the image, the inode and the byte.
 */
import type { DsecError } from '#base';
import { fail } from '../errors.ts';
import type { MetaBytes } from './byte-source.ts';
import { readSuperblock, type Superblock } from './superblock.ts';

export class Metadata {
  readonly bytes: MetaBytes;
  /** For messages: the digest or path of the metadata image. */
  readonly image: string;
  readonly sb: Superblock;

  constructor(bytes: MetaBytes, image: string) {
    this.bytes = bytes;
    this.image = image;
    this.sb = readSuperblock(bytes, image);
  }

  /** Makes bytes of inode `nid` readable in `bytes.buf`; their position there. @throws EROFS_CORRUPT */
  at(nid: number, offset: number, length: number, what: string): number {
    const at = this.bytes.locate(offset, length);
    if (at < 0) {
      throw this.corrupt(
        nid,
        `${what} at byte ${offset}, ${length} bytes long, lies outside the image of ${this.bytes.sizeBytes} bytes`,
      );
    }
    return at;
  }

  corrupt(nid: number, problem: string): DsecError {
    return fail('EROFS_CORRUPT', { image: this.image, where: `nid ${nid}`, problem });
  }

  unsupported(nid: number, feature: string): DsecError {
    return fail('EROFS_UNSUPPORTED', { image: this.image, where: `nid ${nid}`, feature });
  }
}
