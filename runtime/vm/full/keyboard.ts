/**
 * Keys by the names that QEMU has for them, and what to press for a character on a keyboard of the United States: the one that machines are set to
 * unless somebody has changed it.
 */
import { fail } from '../../errors.ts';

/** Names that people write, and QEMU's. */
const SYNONYMS: Readonly<Record<string, string>> = {
  enter: 'ret',
  return: 'ret',
  escape: 'esc',
  space: 'spc',
  del: 'delete',
  control: 'ctrl',
  super: 'meta_l',
  meta: 'meta_l',
  win: 'meta_l',
  pageup: 'pgup',
  pagedown: 'pgdn',
};

const NAMED = [
  ...['shift', 'shift_r', 'alt', 'alt_r', 'ctrl', 'ctrl_r', 'menu', 'meta_l', 'meta_r', 'esc', 'minus', 'equal'],
  ...['backspace', 'tab', 'ret', 'spc', 'bracket_left', 'bracket_right', 'semicolon', 'apostrophe', 'grave_accent'],
  ...[
    'backslash',
    'comma',
    'dot',
    'slash',
    'asterisk',
    'caps_lock',
    'num_lock',
    'scroll_lock',
    'print',
    'sysrq',
    'pause',
  ],
  ...['home', 'end', 'pgup', 'pgdn', 'left', 'right', 'up', 'down', 'insert', 'delete', 'less', 'kp_enter'],
];
const KEYS: ReadonlySet<string> = new Set([
  ...NAMED,
  ...Array.from({ length: 24 }, (_, at) => `f${at + 1}`),
  ...'abcdefghijklmnopqrstuvwxyz0123456789',
]);

/** Without and with shift. */
const SYMBOLS: readonly (readonly [plain: string, shifted: string, key: string])[] = [
  ...[...'1234567890'].map((digit, at) => [digit, '!@#$%^&*()'[at]!, digit] as const),
  ['-', '_', 'minus'],
  ['=', '+', 'equal'],
  ['[', '{', 'bracket_left'],
  [']', '}', 'bracket_right'],
  [';', ':', 'semicolon'],
  ["'", '"', 'apostrophe'],
  ['`', '~', 'grave_accent'],
  ['\\', '|', 'backslash'],
  [',', '<', 'comma'],
  ['.', '>', 'dot'],
  ['/', '?', 'slash'],
];
type Typed = readonly [character: string, chord: readonly string[]];

const CHARACTERS: ReadonlyMap<string, readonly string[]> = new Map<string, readonly string[]>([
  ...[...'abcdefghijklmnopqrstuvwxyz'].flatMap((letter): Typed[] => [
    [letter, [letter]],
    [letter.toUpperCase(), ['shift', letter]],
  ]),
  ...SYMBOLS.flatMap(([plain, shifted, key]): Typed[] => [
    [plain, [key]],
    [shifted, ['shift', key]],
  ]),
  [' ', ['spc']],
  ['\n', ['ret']],
  ['\t', ['tab']],
]);

/** @throws VM_INPUT */
export function keyNamed(name: string): string {
  const lower = name.toLowerCase();
  const key = SYNONYMS[lower] ?? lower;
  if (KEYS.has(key)) return key;
  const typed = CHARACTERS.get(name);
  if (typed?.length === 1) return typed[0]!;
  throw fail('VM_INPUT', { problem: `${JSON.stringify(name)} is no key` });
}

/** One chord a character. @throws VM_INPUT for what this keyboard does not have */
export function chordsOf(text: string): (readonly string[])[] {
  return [...text.replaceAll('\r\n', '\n')].map((character) => {
    const chord = CHARACTERS.get(character);
    if (chord !== undefined) return chord;
    throw fail('VM_INPUT', {
      problem: `${JSON.stringify(character)} is not on the keyboard: put it into a file, or use ASCII`,
    });
  });
}
