/** A root with this machine's Python and its library. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { dirname, join } from 'node:path';

const PYTHON = '/usr/bin/python3';
const LEFT_OUT = /\/(test|idlelib|tkinter|lib2to3|ensurepip|pydoc_data|turtledemo|config-[^/]*|dist-packages)(\/|$)/;

export function pythonMissing(): string | undefined {
  return fs.existsSync(PYTHON) ? undefined : `${PYTHON} (apt-get install python3)`;
}

export function fillPythonRoot(folder: string): void {
  const program = fs.realpathSync(PYTHON);
  const library = execFileSync(PYTHON, ['-c', 'import os; print(os.path.dirname(os.__file__))']).toString().trim();
  fs.mkdirSync(join(folder, 'usr/bin'), { recursive: true });
  fs.symlinkSync('usr/bin', join(folder, 'bin'));
  fs.cpSync(library, join(folder, library), { recursive: true, filter: (path) => !LEFT_OUT.test(path) });
  copy(folder, program);
  const modules = fs.readdirSync(join(library, 'lib-dynload')).map((name) => join(library, 'lib-dynload', name));
  for (const one of [program, ...modules]) {
    for (const [path] of execFileSync('ldd', [one]).toString().matchAll(/\/\S+/g)) copy(folder, path);
  }
  fs.symlinkSync(program, join(folder, 'usr/bin/python3'));
}

function copy(folder: string, path: string): void {
  if (fs.existsSync(join(folder, path))) return;
  fs.mkdirSync(join(folder, dirname(path)), { recursive: true });
  fs.copyFileSync(path, join(folder, path));
  fs.chmodSync(join(folder, path), 0o755);
}
