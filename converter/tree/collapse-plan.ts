/**
 * Which consecutive layers become one EROFS layer.
 *
 * Whether there is a cut between two layers depends on the layers up to the upper one and on the cuts asked for, never on
 * what comes above: two images with a common beginning have the same cuts in it, up to where the longer one goes on in a
 * group. For images converted together, `cutsWhereChainsPart` puts a cut there as well.
 */

export interface PlanOptions {
  /** Sum of the uncompressed layers that one group may reach. A larger layer is a group of its own; 0: every layer is. */
  readonly limitBytes: number;
  /** Numbers of layers before which there must be a cut. */
  readonly cuts?: ReadonlySet<number>;
}

/** Whether layer `next` starts a new group, given the bytes in the group so far. */
export function startsGroup(next: number, groupBytes: number, nextBytes: number, options: PlanOptions): boolean {
  if (next === 0) return false;
  return options.limitBytes === 0 || groupBytes + nextBytes > options.limitBytes || (options.cuts?.has(next) ?? false);
}

/** Layer numbers of each group, bottom first. `sizes` in bytes, bottom first. */
export function planGroups(sizes: readonly number[], options: PlanOptions): number[][] {
  const groups: number[][] = [];
  let bytes = 0;
  sizes.forEach((size, layer) => {
    if (layer === 0 || startsGroup(layer, bytes, size, options)) {
      groups.push([]);
      bytes = 0;
    }
    groups[groups.length - 1]!.push(layer);
    bytes += size;
  });
  return groups;
}

/**
 * For each chain of layer ids (bottom first): before which layers to cut so that what it shares with other chains is in
 * groups of its own. A chain that ends inside another one parts from it, too.
 */
export function cutsWhereChainsPart(chains: readonly (readonly string[])[]): Set<number>[] {
  // What follows a prefix in all chains: more than one continuation (the end counts as one) means a cut after it.
  const following = new Map<string, Set<string>>();
  for (const chain of chains) {
    let prefix = '';
    for (const next of [...chain, '']) {
      const set = following.get(prefix) ?? new Set();
      set.add(next);
      following.set(prefix, set);
      prefix += `/${next}`;
    }
  }
  return chains.map((chain) => {
    const cuts = new Set<number>();
    let prefix = '';
    chain.forEach((id, layer) => {
      if (layer > 0 && following.get(prefix)!.size > 1) cuts.add(layer);
      prefix += `/${id}`;
    });
    return cuts;
  });
}
