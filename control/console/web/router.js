/** Which view the address names: `#/sandboxes/box.edge-1?tab=terminal`. Names are encoded; nothing secret is ever in it. */

/** @typedef {{ view: string, name: string | undefined, query: URLSearchParams }} Place */

/** @returns {Place} */
export function placeOf(/** @type {string} */ hash) {
  const [way = '', query = ''] = hash.replace(/^#\/?/, '').split('?');
  const [view = '', ...rest] = way.split('/');
  return {
    view: view || 'nodes',
    name: rest.length === 0 ? undefined : decoded(rest.join('/')),
    query: new URLSearchParams(query),
  };
}

/** @param {string} view @param {string} [name] @param {Record<string, string | undefined>} [query] */
export function placeTo(view, name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== '');
  const tail = given.length === 0 ? '' : `?${new URLSearchParams(/** @type {[string, string][]} */ (given))}`;
  return `#/${view}${name === undefined ? '' : `/${encodeURIComponent(name)}`}${tail}`;
}

/** The same view otherwise narrowed, without a step in the history. @param {string} place */
export function replacePlace(place) {
  history.replaceState(null, '', place);
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
