/**
 * Finds what a TypeScript or JavaScript file imports: static, type-only, re-exported, dynamic and `require`d modules, and
 * code named by `new URL('./x.ts', import.meta.url)`. A small scanner of its own, because compilers drop type imports before anyone can see
 * them. It skips comments and looks into template expressions; it does not need the file to compile.
 */

/** @typedef {{ specifier: string, line: number }} FoundImport */
/** @typedef {{ kind: 'word' | 'punct' | 'string' | 'other', text: string, line: number }} Token */

/**
 * @param {string} source
 * @returns {FoundImport[]}
 */
export function findImports(source) {
  const tokens = scan(source);
  /** @type {FoundImport[]} */
  const found = [];
  for (let i = 0; i < tokens.length; i++) {
    const token = /** @type {Token} */ (tokens[i]);
    if (token.kind !== 'word' || isProperty(tokens, i)) continue;
    const next = tokens[i + 1];
    const string = token.text === 'import' || token.text === 'export' ? fromClause(tokens, i) : undefined;
    if (string !== undefined) found.push({ specifier: string.text, line: string.line });
    else if (token.text === 'import' || token.text === 'require') {
      if (next?.text === '(' && tokens[i + 2]?.kind === 'string') {
        const argument = /** @type {Token} */ (tokens[i + 2]);
        found.push({ specifier: argument.text, line: argument.line });
      }
    } else if (token.text === 'URL' && next?.text === '(' && tokens[i + 2]?.kind === 'string') {
      const [argument, comma, base] = /** @type {Token[]} */ (tokens.slice(i + 2, i + 5));
      const code = /\.[cm]?[jt]s$/.test(argument?.text ?? '');
      if (code && comma?.text === ',' && base?.text === 'import' && argument !== undefined) {
        found.push({ specifier: argument.text, line: argument.line });
      }
    }
  }
  return found;
}

/** @param {Token[]} tokens @param {number} i */
function isProperty(tokens, i) {
  const before = tokens[i - 1];
  return before?.kind === 'punct' && before.text === '.';
}

/**
 * The module of `import 'x'`, `import a, { b as c } from 'x'`, `export * from 'x'`, `import type ...`: the first string after
 * only names, braces, commas and stars.
 * @param {Token[]} tokens @param {number} start
 */
function fromClause(tokens, start) {
  for (let i = start + 1; i < tokens.length; i++) {
    const token = /** @type {Token} */ (tokens[i]);
    if (token.kind === 'string') {
      const before = /** @type {Token} */ (tokens[i - 1]);
      const afterFrom = before.kind === 'word' && before.text === 'from';
      const bareImport = i === start + 1 && tokens[start]?.text === 'import';
      if (afterFrom || bareImport) return token;
      // `import { 'odd name' as x }` goes on; anything else is no import.
      if (before.text !== '{' && before.text !== ',') return undefined;
    } else if (token.kind === 'word') {
      if (token.text === 'import' || token.text === 'export') return undefined;
    } else if (token.kind !== 'punct' || !['{', '}', ',', '*'].includes(token.text)) return undefined;
  }
  return undefined;
}

/** After these words a `/` starts a regular expression, not a division. */
const BEFORE_REGEXP = new Set([
  'return',
  'typeof',
  'case',
  'in',
  'of',
  'delete',
  'void',
  'throw',
  'new',
  'else',
  'do',
  'await',
  'yield',
]);

/**
 * @param {string} source
 * @returns {Token[]}
 */
function scan(source) {
  /** @type {Token[]} */
  const tokens = [];
  let at = 0;
  let line = 1;
  /** Depth of `{` at which each open template expression ends. @type {number[]} */
  const templates = [];
  let depth = 0;

  /** @param {Token['kind']} kind @param {string} text @param {number} [atLine] */
  const push = (kind, text, atLine = line) => tokens.push({ kind, text, line: atLine });
  const regexpMayStart = () => {
    const last = tokens[tokens.length - 1];
    if (last === undefined) return true;
    if (last.kind === 'word') return BEFORE_REGEXP.has(last.text);
    return last.kind === 'punct' && last.text !== ')' && last.text !== ']' && last.text !== '}';
  };
  /** Reads template text from `at` to its end or to its next `${`. */
  const template = () => {
    while (at < source.length) {
      const c = source[at];
      if (c === '\\') at += 2;
      else if (c === '`') {
        at++;
        push('other', '`');
        return;
      } else if (c === '$' && source[at + 1] === '{') {
        at += 2;
        templates.push(depth++);
        push('punct', '{');
        return;
      } else {
        if (c === '\n') line++;
        at++;
      }
    }
  };

  while (at < source.length) {
    const c = /** @type {string} */ (source[at]);
    const two = source.slice(at, at + 2);
    if (c === '\n') {
      line++;
      at++;
    } else if (two === '//' || (two === '#!' && at === 0)) {
      const end = source.indexOf('\n', at);
      at = end < 0 ? source.length : end;
    } else if (two === '/*') {
      const end = source.indexOf('*/', at + 2);
      const stop = end < 0 ? source.length : end + 2;
      line += source.slice(at, stop).split('\n').length - 1;
      at = stop;
    } else if (c === "'" || c === '"') {
      let text = '';
      at++;
      while (at < source.length && source[at] !== c && source[at] !== '\n') {
        if (source[at] === '\\') at++;
        text += source[at++];
      }
      at++;
      push('string', text);
    } else if (c === '`') {
      // A template without expressions can name a module in `import()`.
      const plain = /^`([^`\\$]*)`/.exec(source.slice(at, at + 4096));
      if (plain !== null) {
        push('string', /** @type {string} */ (plain[1]));
        line += /** @type {string} */ (plain[0]).split('\n').length - 1;
        at += plain[0].length;
      } else {
        at++;
        template();
      }
    } else if (c === '/' && regexpMayStart()) {
      at++;
      let inClass = false;
      while (at < source.length && source[at] !== '\n' && (inClass || source[at] !== '/')) {
        if (source[at] === '\\') at++;
        else if (source[at] === '[') inClass = true;
        else if (source[at] === ']') inClass = false;
        at++;
      }
      at++;
      push('other', 'regexp');
    } else if (/[\w$\u0080-\uffff]/.test(c)) {
      const word = /** @type {string} */ (/^[\w$\u0080-\uffff]+/.exec(source.slice(at, at + 256))?.[0]);
      push('word', word);
      at += word.length;
    } else if (c === '{' || c === '}') {
      at++;
      if (c === '{') depth++;
      else depth--;
      push('punct', c);
      if (c === '}' && templates[templates.length - 1] === depth) {
        templates.pop();
        template();
      }
    } else {
      at++;
      if (!/\s/.test(c)) push('punct', c);
    }
  }
  return tokens;
}
