/**
 * What each language is: how the file of its code is called, how it is compiled and how it is run. A table, so that a pool can bring its own rows
 * and change these; programs are those of the pool's image, found by its PATH.
 *
 * In arguments `{file}` is the name of the code's file; all is done in the task's own folder.
 */
import { isDsecError } from '#base';
import { fail } from '../errors.ts';

export interface Language {
  /** Of the code's file; the caller may name another one. */
  readonly file: string;
  readonly compile?: readonly string[];
  readonly run: readonly string[];
  /** Beside the pool's and the task's own. */
  readonly env?: Readonly<Record<string, string>>;
}

export type LanguageTable = Readonly<Record<string, Language>>;

export const LANGUAGES: LanguageTable = {
  bash: { file: 'main.sh', run: ['bash', '{file}'] },
  c: { file: 'main.c', compile: ['gcc', '-O2', '-std=gnu11', '-o', 'main', '{file}', '-lm'], run: ['./main'] },
  // A program of the image, in `args` with its arguments; no code, no shell.
  command: { file: '.command', run: [] },
  cpp: { file: 'main.cpp', compile: ['g++', '-O2', '-std=gnu++17', '-o', 'main', '{file}'], run: ['./main'] },
  cuda: { file: 'main.cu', compile: ['nvcc', '-O2', '-o', 'main', '{file}'], run: ['./main'] },
  go: {
    file: 'main.go',
    compile: ['go', 'build', '-o', 'main', '{file}'],
    run: ['./main'],
    env: { GOCACHE: '/tmp/go-cache', GOPATH: '/tmp/go', GO111MODULE: 'off', GOTOOLCHAIN: 'local' },
  },
  java: { file: 'Main.java', compile: ['javac', '-encoding', 'UTF-8', '{file}'], run: ['java', '-Xss64m', 'Main'] },
  javascript: { file: 'main.js', run: ['node', '{file}'] },
  lua: { file: 'main.lua', run: ['lua', '{file}'] },
  perl: { file: 'main.pl', run: ['perl', '{file}'] },
  php: { file: 'main.php', run: ['php', '{file}'] },
  python: { file: 'main.py', run: ['python3', '{file}'] },
  ruby: { file: 'main.rb', run: ['ruby', '{file}'] },
  rust: { file: 'main.rs', compile: ['rustc', '-O', '-o', 'main', '{file}'], run: ['./main'] },
  sh: { file: 'main.sh', run: ['sh', '{file}'] },
  typescript: { file: 'main.ts', run: ['tsx', '{file}'] },
};

/** Names that other services know them by. */
const ALIASES: Readonly<Record<string, string>> = {
  'c++': 'cpp',
  js: 'javascript',
  node: 'javascript',
  nodejs: 'javascript',
  py: 'python',
  python3: 'python',
  golang: 'go',
  ts: 'typescript',
};

/** @throws RUNTIME_FNCALL_LANGUAGE */
export function languageNamed(name: string, own: LanguageTable = {}): { name: string; language: Language } {
  const table = { ...LANGUAGES, ...own };
  const known = Object.hasOwn(table, name) ? name : (ALIASES[name] ?? name);
  if (!Object.hasOwn(table, known)) {
    throw fail('RUNTIME_FNCALL_LANGUAGE', { language: name, known: Object.keys(table).sort().join(', ') });
  }
  return { name: known, language: table[known]! };
}

export function argumentsFor(template: readonly string[], file: string): string[] {
  return template.map((part) => part.replaceAll('{file}', file));
}

export function isUnknownLanguage(error: unknown): boolean {
  return isDsecError(error, 'RUNTIME_FNCALL_LANGUAGE');
}
