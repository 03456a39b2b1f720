/** One range of a Range header (RFC 9110, section 14). */

/** Undefined: the whole, since a header that is not understood, or asks for several ranges, is to be ignored. */
export function parseRange(
  header: string | undefined,
  sizeBytes: number,
): { offset: number; length: number } | 'unsatisfiable' | undefined {
  const match = /^bytes=\s*(\d*)\s*-\s*(\d*)\s*$/i.exec(header ?? '');
  if (match === null) return undefined;
  const [, first = '', last = ''] = match;
  if (first === '' && last === '') return undefined;
  if (first === '') {
    const length = Math.min(Number(last), sizeBytes);
    return length === 0 ? 'unsatisfiable' : { offset: sizeBytes - length, length };
  }
  const offset = Number(first);
  if (last !== '' && Number(last) < offset) return undefined;
  if (offset >= sizeBytes) return 'unsatisfiable';
  const end = last === '' ? sizeBytes : Math.min(Number(last) + 1, sizeBytes);
  return { offset, length: end - offset };
}
