/** Which ranges a target takes: whole blocks inside it. */
import type { BlockTarget } from './block-target.ts';
import { TargetError } from './target-error.ts';

type Sized = Pick<BlockTarget, 'sizeBytes' | 'blockSize'>;

export function isInside({ sizeBytes, blockSize }: Sized, offset: number, length: number): boolean {
  return (
    Number.isSafeInteger(offset) &&
    Number.isSafeInteger(length) &&
    offset >= 0 &&
    length >= 0 &&
    offset <= sizeBytes - length &&
    offset % blockSize === 0 &&
    length % blockSize === 0
  );
}

/** @throws TargetError EINVAL */
export function checkRange(target: Sized, offset: number, length: number): void {
  if (isInside(target, offset, length)) return;
  const { sizeBytes, blockSize } = target;
  throw new TargetError('TARGET_RANGE', { offset, length, sizeBytes, blockSize });
}
