/** Encoding a directory of 10,000 names as EROFS has it. */
import { directoryBytes, encodeDirectory } from '#converter';
import { measure, type Speed } from './measure.ts';

export function directories(): Promise<Speed[]> {
  const names = Array.from({ length: 10_000 }, (_, i) => ({
    name: `some-file-name-${i}.js`,
    nid: i * 3 + 40,
    fileType: 1,
  }));
  names.sort((a, b) => (a.name < b.name ? -1 : 1));
  const bytes = directoryBytes(names);
  return measure(`a directory of ${names.length} names, ${(bytes / 1e6).toFixed(2)} MB`, [
    { name: 'encodeDirectory', bytes, run: () => encodeDirectory(names, directoryBytes(names)) },
  ]);
}
