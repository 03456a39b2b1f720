/** Roots for tasks: this machine's Python, a shell and some tools, with the libraries that they name; and a C compiler, which is larger. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { dirname, join } from 'node:path';

const TOOLS = ['bash', 'cat', 'ls', 'env', 'sleep', 'id', 'nice', 'setsid', 'mkdir', 'rm', 'ln', 'head', 'dd', 'ps'];

/** Folders of the standard library that no test needs. */
const LEFT_OUT = /\/(test|idlelib|tkinter|lib2to3|ensurepip|pydoc_data|turtledemo|config-[^/]*|dist-packages)(\/|$)/;

export interface PythonFacts {
  readonly program: string;
  readonly library: string;
}

/** Undefined, with a printed reason, where there is none. */
export function hostPython(): PythonFacts | undefined {
  try {
    const said = execFileSync('/usr/bin/python3', [
      '-c',
      'import os, sys; print(os.path.realpath(sys.executable)); print(os.path.dirname(os.__file__))',
    ]);
    const [program, library] = said.toString().trim().split('\n');
    return { program: program!, library: library! };
  } catch {
    console.log('skipped: no /usr/bin/python3 for the image');
    return undefined;
  }
}

export function fillTaskRoot(folder: string, python: PythonFacts | undefined): void {
  for (const name of ['etc', 'root', 'home', 'tmp', 'usr/bin', 'var/tmp', 'run']) {
    fs.mkdirSync(join(folder, name), { recursive: true });
  }
  fs.symlinkSync('usr/bin', join(folder, 'bin'));
  fs.chmodSync(join(folder, 'tmp'), 0o1777);
  fs.writeFileSync(
    join(folder, 'etc/passwd'),
    'root:x:0:0::/root:/bin/sh\nsandbox:x:1000:1000::/home/sandbox:/bin/sh\n',
  );
  fs.writeFileSync(join(folder, 'etc/group'), 'root:x:0:\nsandbox:x:1000:\n');
  const busybox = join(folder, 'usr/bin/busybox');
  fs.copyFileSync('/bin/busybox', busybox);
  fs.symlinkSync('busybox', join(folder, 'usr/bin/sh'));
  for (const tool of TOOLS)
    copyProgram(
      folder,
      execFileSync('sh', ['-c', `command -v ${tool}`])
        .toString()
        .trim(),
      `/usr/bin/${tool}`,
    );
  if (python === undefined) return;
  copyProgram(folder, python.program, python.program);
  fs.symlinkSync(python.program, join(folder, 'usr/bin/python3'));
  fs.cpSync(python.library, join(folder, python.library), {
    recursive: true,
    filter: (path) => !LEFT_OUT.test(path) && !path.endsWith('.opt-1.pyc') && !path.endsWith('.opt-2.pyc'),
  });
  for (const module of fs.readdirSync(join(folder, python.library, 'lib-dynload'))) {
    copyLibraries(folder, join(python.library, 'lib-dynload', module));
  }
}

export function fillCompiler(folder: string): void {
  const version = execFileSync('gcc', ['-dumpversion']).toString().trim();
  const triplet = execFileSync('gcc', ['-dumpmachine']).toString().trim();
  const own = `/usr/lib/gcc/${triplet}/${version}`;
  fs.mkdirSync(join(folder, own), { recursive: true });
  for (const name of fs.readdirSync(own)) {
    if (!/^(cc1|collect2|lto-wrapper|liblto_plugin\.so|crt.*\.o|libgcc.*|include)$/.test(name)) continue;
    fs.cpSync(join(own, name), join(folder, own, name), { recursive: true });
  }
  for (const program of [join(own, 'cc1'), join(own, 'collect2'), join(own, 'liblto_plugin.so')])
    copyLibraries(folder, program);
  for (const tool of ['gcc', 'as', 'ld']) {
    const path = fs.realpathSync(
      execFileSync('sh', ['-c', `command -v ${tool}`])
        .toString()
        .trim(),
    );
    copyProgram(folder, path, path);
    if (path !== `/usr/bin/${tool}`) fs.symlinkSync(path, join(folder, 'usr/bin', tool));
  }
  for (const tree of ['/usr/include', `/usr/include/${triplet}`]) {
    for (const name of fs.readdirSync(tree)) {
      const wanted =
        /^(std|bits|sys|gnu|asm|linux|features|unistd|string|math|alloca|endian|ctype|errno|limits|time)/.test(name);
      if (wanted || tree.endsWith('gnu'))
        fs.cpSync(join(tree, name), join(folder, tree, name), { recursive: true, dereference: true });
    }
  }
  const libraries = `/usr/lib/${triplet}`;
  for (const name of [
    'crt1.o',
    'crti.o',
    'crtn.o',
    'Scrt1.o',
    'libc.so',
    'libc_nonshared.a',
    'libm.so',
    'libmvec.so.1',
  ]) {
    if (fs.existsSync(join(libraries, name))) copy(folder, join(libraries, name), join(libraries, name));
  }
  for (const name of ['libc.so.6', 'libm.so.6', 'libmvec.so.1', 'libgcc_s.so.1'])
    copy(folder, join(libraries, name), `/lib/${triplet}/${name}`);
}

function copyProgram(folder: string, from: string, to: string): void {
  copy(folder, from, to);
  copyLibraries(folder, from);
}

/** What the dynamic linker would load, where it looks for it. */
function copyLibraries(folder: string, program: string): void {
  let said = '';
  try {
    said = execFileSync('ldd', [program], { stdio: ['ignore', 'pipe', 'ignore'] }).toString();
  } catch {
    // A static one.
  }
  for (const [path] of said.matchAll(/\/\S+/g)) copy(folder, path, path);
}

function copy(folder: string, from: string, to: string): void {
  const target = join(folder, to);
  if (fs.existsSync(target)) return;
  fs.mkdirSync(dirname(target), { recursive: true });
  fs.copyFileSync(from, target);
  fs.chmodSync(target, fs.statSync(from).mode & 0o777);
}
