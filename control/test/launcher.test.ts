import { type ChildProcess, execFile, spawn, spawnSync } from 'node:child_process';
import {
  cpSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';

const project = join(import.meta.dirname, '../..');

/** A project of two files behind the real launcher. */
describe('bin/dsec', () => {
  let root: string;
  const write = (path: string, text: string) => writeFileSync(join(root, path), text);
  const run = (...args: string[]) =>
    spawnSync(process.execPath, [join(root, 'bin/dsec'), ...args], { encoding: 'utf8' });
  const stampTime = () => statSync(join(root, 'dist/dsec.stamp.json')).mtimeMs;
  const builds = () => readdirSync(join(root, 'dist')).filter((name) => !name.endsWith('.json'));

  beforeEach(() => {
    root = mkdtempSync(join(tmpdir(), 'dsec-launcher-'));
    for (const folder of ['bin', 'scripts', 'control/cli']) mkdirSync(join(root, folder), { recursive: true });
    cpSync(join(project, 'bin/dsec'), join(root, 'bin/dsec'));
    for (const name of ['bundle.mjs', 'bundle-stamp.mjs', 'worker-entries.mjs']) {
      cpSync(join(project, 'scripts', name), join(root, 'scripts', name));
    }
    symlinkSync(join(project, 'node_modules'), join(root, 'node_modules'));
    write('package.json', '{"name":"dsec","version":"0.0.0","type":"module"}');
    write(
      'control/cli/main.ts',
      "import { word } from './word.ts';\nexport const main = (args: string[]): void => console.log(word, ...args);\n",
    );
    write('control/cli/word.ts', "export const word: string = 'one';\n");
  });
  afterEach(() => rmSync(root, { recursive: true, force: true }));

  it('builds once, then runs what it built', () => {
    expect(run('a', 'b').stdout).toBe('one a b\n');
    const first = stampTime();
    expect(run().stdout).toBe('one\n');
    expect(stampTime()).toBe(first);
    expect(builds()).toHaveLength(1);
  });

  it('notices an edit of the same length', () => {
    run();
    write('control/cli/word.ts', "export const word: string = 'two';\n");
    expect(run().stdout).toBe('two\n');
  });

  it('notices an edit that keeps the time but not the size', () => {
    run();
    const { atime, mtime } = statSync(join(root, 'control/cli/word.ts'));
    write('control/cli/word.ts', "export const word: string = 'three';\n");
    utimesSync(join(root, 'control/cli/word.ts'), atime, mtime);
    expect(run().stdout).toBe('three\n');
  });

  it('notices a file that is added, and one that is removed', () => {
    run();
    write('control/cli/other.ts', "export const word = 'other';\n");
    write(
      'control/cli/main.ts',
      "import { word } from './other.ts';\nexport const main = (): void => console.log(word);\n",
    );
    expect(run().stdout).toBe('other\n');
    rmSync(join(root, 'control/cli/other.ts'));
    const { status, stderr } = run();
    expect(status).toBe(1);
    expect(stderr).toContain('./other.ts');
    expect(stderr).toContain('dsec: the sources do not compile: see above\n');
    expect(stderr).not.toContain('at ');
    write('control/cli/other.ts', "export const word = 'back';\n");
    expect(run().stdout).toBe('back\n');
  });

  it('builds again when the stamp is damaged or the build is gone', () => {
    run();
    writeFileSync(join(root, 'dist/dsec.stamp.json'), '{"folder": "dsec-');
    expect(run().stdout).toBe('one\n');
    rmSync(join(root, 'dist', builds()[0]!), { recursive: true });
    expect(run().stdout).toBe('one\n');
  });

  it('builds for every user, whatever the umask', () => {
    spawnSync('sh', ['-c', `umask 077; exec ${process.execPath} ${root}/bin/dsec`]);
    const folder = join(root, 'dist', builds()[0]!);
    expect(statSync(folder).mode & 0o777).toBe(0o755);
    expect(statSync(join(folder, 'dsec.mjs')).mode & 0o777).toBe(0o644);
    expect(statSync(join(root, 'dist/dsec.stamp.json')).mode & 0o777).toBe(0o644);
  });

  it('lets many processes build at once', async () => {
    const runs = Array.from({ length: 6 }, () => promisify(execFile)(process.execPath, [join(root, 'bin/dsec')]));
    for (const { stdout, stderr } of await Promise.all(runs)) expect([stdout, stderr]).toEqual(['one\n', '']);
    expect(builds()).toHaveLength(1);
    expect(run().stdout).toBe('one\n');
  });

  it('keeps the chunks of a build that a process still runs', async () => {
    write('control/cli/late.ts', "export const late = 'late one';\n");
    write(
      'control/cli/main.ts',
      `export async function main(): Promise<void> {
  console.log('ready');
  await new Promise((resolve) => process.stdin.once('data', resolve));
  const { late } = await import('./late.ts');
  console.log(late);
  process.exit();
}
`,
    );
    const child = spawn(process.execPath, [join(root, 'bin/dsec')], { stdio: ['pipe', 'pipe', 'inherit'] });
    let output = '';
    child.stdout.on('data', (chunk) => {
      output += chunk;
    });
    await new Promise((resolve) => child.stdout.once('data', resolve));
    write('control/cli/late.ts', "export const late = 'late two';\n");
    spawnSync(process.execPath, [join(root, 'bin/dsec')], { input: 'go' });
    child.stdin.write('go');
    expect(await exitOf(child)).toBe(0);
    expect(output).toBe('ready\nlate one\n');
  });

  it('says what to do when packages are not installed', () => {
    rmSync(join(root, 'node_modules'));
    const { status, stderr } = run('ls');
    expect(status).toBe(1);
    expect(stderr).toBe(
      `dsec: the packages it needs are not installed. In ${root}, run npm start or npm test once, or npm ci.\n`,
    );
  });

  it('runs through a symbolic link, as npm installs it', () => {
    symlinkSync(join(root, 'bin/dsec'), join(root, 'linked'));
    expect(spawnSync(join(root, 'linked'), ['x'], { encoding: 'utf8' }).stdout).toBe('one x\n');
  });

  it('runs by sh from any folder, however it is named', () => {
    run();
    mkdirSync(join(root, 'links'));
    symlinkSync('../bin/dsec', join(root, 'links/dsec'));
    const by = (program: string, cwd: string, path = process.env.PATH) =>
      spawnSync(program, ['a b', '--'], { cwd, encoding: 'utf8', env: { ...process.env, PATH: path } }).stdout;
    const expected = 'one a b --\n';
    expect(by('./dsec', join(root, 'bin'))).toBe(expected);
    expect(by('bin/dsec', root)).toBe(expected);
    expect(by('./links/dsec', root)).toBe(expected);
    expect(by('dsec', '/', `${join(root, 'links')}:${process.env.PATH}`)).toBe(expected);
    const bySh = (script: string) =>
      spawnSync('sh', [script, 'x'], { cwd: join(root, 'bin'), encoding: 'utf8' }).stdout;
    expect([bySh('dsec'), bySh('../links/dsec')]).toEqual(['one x\n', 'one x\n']);
  });

  it('gives an API server room for what is under way, and no other command', () => {
    write('control/cli/main.ts', 'export const main = (): void => console.log(JSON.stringify(process.execArgv));\n');
    const by = (...args: string[]) => spawnSync(join(root, 'bin/dsec'), args, { encoding: 'utf8' }).stdout;
    expect(by('serve', 'apiserver', '--help')).toBe('["--max-semi-space-size=64"]\n');
    for (const args of [['serve', 'watcher'], ['serve'], ['version'], []]) expect(by(...args)).toBe('[]\n');
  });

  it('goes to the service with run alone, and only where its client and its socket are', async () => {
    const folder = join(root, 'run dir');
    mkdirSync(folder);
    mkdirSync(join(root, 'dist/agent'), { recursive: true });
    const program = join(root, 'dist/agent/dsec-agent');
    writeFileSync(program, '#!/bin/sh\nprintf "%s|" "$@"\n', { mode: 0o755 });
    const env = { ...process.env, DSEC_RUN: folder };
    const by = (...args: string[]) =>
      spawnSync(join(root, 'bin/dsec'), args, { cwd: '/', encoding: 'utf8', env }).stdout;
    expect(by('run', 'x')).toBe('one run x\n');
    const server = createServer();
    await new Promise<void>((resolve) => server.listen(join(folder, 'runtime.sock'), resolve));
    try {
      const line = ['client', join(folder, 'runtime.sock'), 'node', join(root, 'bin/dsec'), 'run', 'a b', '--', '-x'];
      expect(by('run', 'a b', '--', '-x')).toBe(`${line.join('|')}|`);
      expect(by('ls', 'run')).toBe('one ls run\n');
      rmSync(program);
      expect(by('run', 'x')).toBe('one run x\n');
    } finally {
      await new Promise((resolve) => server.close(resolve));
    }
  });

  it.skipIf(process.getuid?.() !== 0)('runs from source in a checkout that cannot be written', () => {
    const script = `mount --bind ${root} ${root} && mount -o remount,ro,bind ${root} && exec ${process.execPath} ${root}/bin/dsec x`;
    const { stdout, stderr } = spawnSync('unshare', ['-m', 'sh', '-c', script], { encoding: 'utf8' });
    expect([stdout, stderr]).toEqual(['one x\n', '']);
    expect(readdirSync(root)).not.toContain('dist');
  });

  it('records every source file of the build and no installed package', () => {
    run();
    const { files } = JSON.parse(readFileSync(join(root, 'dist/dsec.stamp.json'), 'utf8'));
    expect(Object.keys(files)).toEqual(
      expect.arrayContaining(['control/cli/main.ts', 'control/cli/word.ts', 'package.json']),
    );
    expect(Object.keys(files).filter((path) => path.includes('node_modules'))).toEqual([
      'node_modules/.package-lock.json',
    ]);
  });
});

function exitOf(child: ChildProcess): Promise<number | null> {
  return new Promise((resolve) => child.once('close', resolve));
}
