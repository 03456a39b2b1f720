/**
 * Elements, made by functions. Text becomes text nodes and nothing else; there is no way from a string to markup, so a name that looks like
 * HTML is shown as it is. Links lead inside the page only.
 */

/** @typedef {Node | string | number | false | null | undefined} Child */
/**
 * @typedef {object} Special
 * @property {Record<string, (event: any) => void>} [on] Listeners.
 * @property {Record<string, string>} [vars] Custom properties of CSS.
 */
/** @typedef {Special & Record<string, unknown>} Properties */

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Properties | null} [properties] @param {...Child} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  if (properties) setProperties(element, properties);
  append(element, children);
  return element;
}

/** @param {string} tag @param {Record<string, string | number>} attributes @param {...Child} children */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  append(element, children);
  return element;
}

/** @param {HTMLElement} element @param {Properties} properties */
export function setProperties(element, { on, vars, ...attributes }) {
  for (const [event, listener] of Object.entries(on ?? {})) element.addEventListener(event, listener);
  for (const [name, value] of Object.entries(vars ?? {})) element.style.setProperty(name, value);
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
}

/** @param {Element} element @param {string} name @param {unknown} value */
function setAttribute(element, name, value) {
  if (value === undefined || value === null || value === false) return element.removeAttribute(name);
  if (/^on/i.test(name) || name === 'style' || name === 'srcdoc') throw new Error(`no attribute for strings: ${name}`);
  if (name === 'href' && !String(value).startsWith('#')) throw new Error('links lead inside the page');
  element.setAttribute(name, value === true ? '' : String(value));
}

/**
 * Characters that are not seen, or turn the direction of those that follow, are written out: `gnp.exe` stays what it is.
 * @param {string} text
 */
export function shown(text) {
  return text.replace(
    /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (character) => {
      return `\\u${character.charCodeAt(0).toString(16).padStart(4, '0')}`;
    },
  );
}

/** @param {Element} element @param {readonly Child[]} children */
function append(element, children) {
  for (const child of children) {
    if (child === undefined || child === null || child === false) continue;
    element.append(typeof child === 'object' ? child : shown(String(child)));
  }
}

/** Puts these in place of all children. @param {Element} element @param {...Child} children */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** Changes the text only where it is another one: no work for what stands still. @param {Node} node @param {string | number} value */
export function setText(node, value) {
  const text = shown(String(value));
  if (node.textContent !== text) node.textContent = text;
}
