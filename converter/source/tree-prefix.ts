/** `--prefix`: the folder of the image that a tree is placed at, checked. */
import { type ByteString, fromText } from '#base';
import { fail } from '../errors.ts';
import { quote } from './quote.ts';

const MAX_NAME_BYTES = 255;
/** Leaves room for the paths of the tree within what Linux takes. */
const MAX_PREFIX_BYTES = 1024;

/** Without the slashes around it. @throws SOURCE_PREFIX */
export function treePrefix(text: string): ByteString {
  const bad = (problem: string) => fail('SOURCE_PREFIX', { prefix: quote(text), problem });
  if (!text.startsWith('/')) throw bad('it does not begin with a slash');
  if (text.includes('\0')) throw bad('it holds a NUL byte');
  const path = fromText(text);
  const parts = path.split('/').filter((part) => part !== '');
  if (parts.length === 0) throw bad('that is where the tree goes anyway');
  if (parts.includes('.') || parts.includes('..')) throw bad('"." and ".." are no names in an image');
  if (parts.some((part) => part.startsWith('.wh.'))) throw bad('names that begin with .wh. mean deletions in a layer');
  if (parts.some((part) => part.length > MAX_NAME_BYTES))
    throw bad(`a name in it is longer than ${MAX_NAME_BYTES} bytes`);
  if (path.length > MAX_PREFIX_BYTES) throw bad(`it is longer than ${MAX_PREFIX_BYTES} bytes`);
  return parts.join('/');
}
