/**
 * A layer's tree placed below a folder of the image (`convert --prefix /workspace`): each entry's path, and a hard link's
 * target, which names a path of the same tree. Whiteouts and opaque marks go by their paths, so they come along; a
 * symlink's target is what the program that reads it sees, and stays.
 *
 * The folders on the way are told first, 0755 root:root with time 0, so that the result is the same whatever the tree begins
 * with. The tree's own root, where it names one, gives the last of them its attributes.
 */
import type { ByteString } from '#base';
import { bareEntry, type Entry, type EntryHandler } from './entry.ts';

/** `handler` itself without a prefix. `prefix`: components with a slash between them, none of them `.` or `..`. */
export function underPrefix(prefix: ByteString | undefined, handler: EntryHandler): EntryHandler {
  if (prefix === undefined) return handler;
  const parts = prefix.split('/');
  for (let i = 1; i <= parts.length; i++) {
    handler.entry({ ...bareEntry(parts.slice(0, i).join('/'), 'dir'), mode: 0o755 });
  }
  return {
    entry(entry: Entry) {
      const path = placed(prefix, entry.path);
      handler.entry(
        entry.kind === 'hardlink' ? { ...entry, path, target: placed(prefix, entry.target) } : { ...entry, path },
      );
    },
    data: (bytes) => handler.data(bytes),
    hole: (sizeBytes) => handler.hole(sizeBytes),
    fileEnd: () => handler.fileEnd(),
  };
}

/** `..` is clamped at the tree's root: no path leads out of the prefix. */
function placed(prefix: ByteString, path: ByteString): ByteString {
  if (!path.includes('..')) return `${prefix}/${path}`;
  const parts: ByteString[] = [];
  for (const part of path.split('/')) {
    if (part === '..') parts.pop();
    else if (part !== '' && part !== '.') parts.push(part);
  }
  return `${prefix}/${parts.join('/')}`;
}
