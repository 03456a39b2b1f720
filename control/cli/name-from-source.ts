/** The name an image gets when none was given: the repository without its registry, and the tag. */

/** `docker://host:5000/team/web:1` -> `team/web:1`, `oci:/srv/images:web` -> `images:web`. Undefined without a tag to go by. */
export function nameFromSource(source: string): string | undefined {
  const registry = /^docker:\/\/(?:[^/]*[.:][^/]*\/|localhost\/)?([^@:]+)(?::([^@]+))?(?:@.*)?$/.exec(source);
  if (registry !== null) {
    // A digest alone names no version that a person would recognise.
    if (registry[2] === undefined && source.includes('@')) return undefined;
    return `${registry[1]!.replace(/^library\//, '')}:${registry[2] ?? 'latest'}`;
  }
  const local = /^oci(?:-archive)?:(.+):([\w][\w.-]*)$/.exec(source);
  if (local === null) return undefined;
  const base = local[1]!
    .replace(/\/+$/, '')
    .replace(/^.*\//, '')
    .replace(/\.(?:tar|tgz|tar\.gz)$/, '');
  return /^[a-z0-9]+(?:[._-][a-z0-9]+)*$/.test(base) ? `${base}:${local[2]}` : undefined;
}
