/** Projects and quotas, which the API lists by path, as a tree. No DOM here. */

/**
 * @typedef {object} ProjectNode
 * @property {string} path
 * @property {string} name What it is called below its parent; the whole path where the parent is not to be read.
 * @property {number} depth
 * @property {any} [quota] limits, used and delegated, by resource.
 * @property {ProjectNode[]} children
 */

/** @param {any[]} projects @param {any[]} quotas @returns {ProjectNode[]} */
export function treeOf(projects, quotas) {
  const quotaOf = new Map(quotas.map((quota) => [String(quota.project ?? quota.path), quota]));
  const paths = new Set([...projects.map((one) => String(one.path ?? one.name ?? one)), ...quotaOf.keys()]);
  /** @type {Map<string, ProjectNode>} */
  const nodes = new Map();
  /** @type {ProjectNode[]} */
  const roots = [];
  for (const path of [...paths].sort()) {
    const parent = nearest(nodes, path);
    const name = parent === undefined ? path : path.slice(parent.path.length + 1);
    const node = {
      path,
      name,
      depth: parent === undefined ? 0 : parent.depth + 1,
      quota: quotaOf.get(path),
      children: [],
    };
    (parent?.children ?? roots).push(node);
    nodes.set(path, node);
  }
  return roots;
}

/** @param {Map<string, ProjectNode>} nodes @param {string} path */
function nearest(nodes, path) {
  for (let at = path.lastIndexOf('/'); at > 0; at = path.lastIndexOf('/', at - 1)) {
    const node = nodes.get(path.slice(0, at));
    if (node !== undefined) return node;
  }
  return undefined;
}
