/**
 * Whether a bundle in dist/ is still what its sources say, in a few milliseconds and without loading esbuild.
 *
 * `dist/<name>.stamp.json` names the folder of the last build and the size and mtime of every file that went into it
 * (installed packages are represented by npm's own record of them). A file that is added changes nothing until another
 * one imports it, and that one is then edited: so the inputs of the build are all there is to look at.
 */
import { readFileSync, statSync, watch } from 'node:fs';
import { dirname, join } from 'node:path';

/**
 * @typedef {object} Stamp
 * @property {string} folder Folder of the build, in dist/.
 * @property {Record<string, string>} files Path from the root -> `fileState` of it.
 */

/** @param {string} root @param {string} name */
export function stampPath(root, name) {
  return join(root, 'dist', `${name}.stamp.json`);
}

/**
 * What tells one version of a file from another; 'missing' when it is not there.
 * @param {string} path
 */
export function fileState(path) {
  const stat = statSync(path, { throwIfNoEntry: false });
  return stat === undefined ? 'missing' : `${stat.mtimeMs} ${stat.size}`;
}

/**
 * Path of a fresh bundle's folder, or undefined when there is none, or it is stale or damaged.
 * @param {string} root @param {string} name
 * @returns {string | undefined}
 */
export function freshBundle(root, name) {
  try {
    /** @type {Stamp} */
    const stamp = JSON.parse(readFileSync(stampPath(root, name), 'utf8'));
    for (const [path, state] of Object.entries(stamp.files)) {
      if (fileState(join(root, path)) !== state) return undefined;
    }
    const folder = join(root, 'dist', stamp.folder);
    return fileState(folder) === 'missing' ? undefined : folder;
  } catch {
    return undefined;
  }
}

/**
 * For a process that stays: whether the bundle in `folder` is still what its sources say, asked often. After the first answer the
 * folders of all inputs are watched, and only when something happened in one of them is there anything to look at. What was
 * changed before is seen by whoever asks in a later turn of the event loop than the one that brought the question.
 * @param {string} root @param {string} name @param {string} folder
 * @returns {() => boolean}
 */
export function watchedFreshness(root, name, folder) {
  let changed = true;
  let watching = false;
  let answer = false;
  let given = false;
  const watchInputs = () => {
    /** @type {Stamp} */
    const stamp = JSON.parse(readFileSync(stampPath(root, name), 'utf8'));
    const folders = new Set(Object.keys(stamp.files).map((path) => dirname(join(root, path))));
    for (const path of [join(root, 'dist'), ...folders]) {
      const watcher = watch(path, { persistent: false }, () => {
        changed = true;
      });
      watcher.on('error', () => {
        watching = false;
      });
    }
  };
  return () => {
    if (watching && !changed) return answer;
    try {
      if (!watching && !given) {
        given = true;
        // First, so that nothing goes unseen between the look and the watch.
        watchInputs();
        watching = true;
      }
    } catch {
      // There are only so many watches; then each question looks at every file.
    }
    changed = false;
    answer = freshBundle(root, name) === folder;
    return answer;
  };
}
