/** Sixteen colours for dark and for light that can be read on either ground. */
import { theme } from '../state/theme.js';

const DARK = {
  background: '#0b0e13',
  foreground: '#d7dde6',
  cursor: '#6cb1ff',
  cursorAccent: '#0b0e13',
  selectionBackground: '#2b4a72',
  black: '#3a4452',
  red: '#ff7b72',
  green: '#5fd08a',
  yellow: '#e3b341',
  blue: '#6cb1ff',
  magenta: '#d2a8ff',
  cyan: '#56d4dd',
  white: '#c3ccd8',
  brightBlack: '#7d8998',
  brightRed: '#ffa198',
  brightGreen: '#86e3a8',
  brightYellow: '#f2cc60',
  brightBlue: '#9bcbff',
  brightMagenta: '#e2c5ff',
  brightCyan: '#8be5ec',
  brightWhite: '#f4f7fb',
};

const LIGHT = {
  background: '#ffffff',
  foreground: '#1b222c',
  cursor: '#1b6ac9',
  cursorAccent: '#ffffff',
  selectionBackground: '#bcd7f7',
  black: '#1b222c',
  red: '#b42318',
  green: '#14713d',
  yellow: '#8a5a00',
  blue: '#1b5fb4',
  magenta: '#7a3ea8',
  cyan: '#0b6a78',
  white: '#5a6675',
  brightBlack: '#4a5563',
  brightRed: '#c9382d',
  brightGreen: '#1b8049',
  brightYellow: '#946300',
  brightBlue: '#2a72cc',
  brightMagenta: '#8e4fbf',
  brightCyan: '#127a8a',
  brightWhite: '#39424e',
};

export function terminalColours() {
  return theme() === 'dark' ? DARK : LIGHT;
}
