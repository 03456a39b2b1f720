/**
 * xterm writes style elements and style attributes as text, which the page's policy refuses, and rightly so. While a terminal is open, the text
 * of what it takes for a style element becomes a constructed sheet, and that of a style attribute goes through CSSOM: what the page itself
 * does is not markup, and the policy stays as it is.
 */

/** @returns {() => void} Ends it. */
export function takeTerminalStyles() {
  /** @type {Set<CSSStyleSheet>} */
  const sheets = new Set();
  const plain = Document.prototype.createElement.bind(document);
  document.createElement = (/** @type {string} */ tag, /** @type {ElementCreationOptions | undefined} */ options) => {
    if (tag === 'style') return sheetElement(plain('span'), sheets);
    const element = plain(tag, options);
    if (tag === 'span') styleThroughObject(element);
    return element;
  };
  return () => {
    // The one of the prototype is there again.
    Reflect.deleteProperty(document, 'createElement');
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((sheet) => !sheets.has(sheet));
  };
}

/** @param {HTMLElement} element */
function styleThroughObject(element) {
  const plain = Element.prototype.setAttribute.bind(element);
  element.setAttribute = (name, value) => {
    if (name === 'style') element.style.cssText = value;
    else plain(name, value);
  };
}

/** Stands where a style element would; its text is a sheet of the document. @param {HTMLElement} element @param {Set<CSSStyleSheet>} sheets */
function sheetElement(element, sheets) {
  element.hidden = true;
  const sheet = new CSSStyleSheet();
  sheets.add(sheet);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  let text = '';
  Object.defineProperty(element, 'textContent', {
    get: () => text,
    set(value) {
      text = String(value);
      sheet.replaceSync(text);
    },
  });
  return element;
}
