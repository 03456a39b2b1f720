/** A root for tasks: busybox, and this machine's Python with its library. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { dirname, join } from 'node:path';

export interface PythonFacts {
  readonly program: string;
  readonly library: string;
}

export function hostPython(): PythonFacts | undefined {
  try {
    const ask = 'import os, sys; print(os.path.realpath(sys.executable)); print(os.path.dirname(os.__file__))';
    const [program, library] = execFileSync('/usr/bin/python3', ['-c', ask]).toString().trim().split('\n');
    return { program: program!, library: library! };
  } catch {
    return undefined;
  }
}

const LEFT_OUT = /\/(test|idlelib|tkinter|lib2to3|ensurepip|pydoc_data|turtledemo|config-[^/]*|dist-packages)(\/|$)/;

export function fillTaskRoot(folder: string, python: PythonFacts | undefined): void {
  fs.mkdirSync(join(folder, 'usr/bin'), { recursive: true });
  fs.symlinkSync('usr/bin', join(folder, 'bin'));
  fs.copyFileSync('/bin/busybox', join(folder, 'usr/bin/busybox'));
  for (const name of ['sh', 'cat', 'echo', 'sleep']) fs.symlinkSync('busybox', join(folder, 'usr/bin', name));
  if (python === undefined) return;
  fs.cpSync(python.library, join(folder, python.library), { recursive: true, filter: (path) => !LEFT_OUT.test(path) });
  const loaded = fs
    .readdirSync(join(python.library, 'lib-dynload'))
    .map((name) => join(python.library, 'lib-dynload', name));
  copy(folder, python.program);
  for (const program of [python.program, ...loaded]) {
    for (const [path] of execFileSync('ldd', [program]).toString().matchAll(/\/\S+/g)) copy(folder, path);
  }
  fs.symlinkSync(python.program, join(folder, 'usr/bin/python3'));
}

function copy(folder: string, path: string): void {
  if (fs.existsSync(join(folder, path))) return;
  fs.mkdirSync(join(folder, dirname(path)), { recursive: true });
  fs.copyFileSync(path, join(folder, path));
  fs.chmodSync(join(folder, path), 0o755);
}
