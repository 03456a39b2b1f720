/**
 * An image whose programs are linked with musl, as Alpine's are: its loader and library from Debian's package musl, tools compiled for it when a test
 * asks for them, and for what is left (a shell) a static busybox.
 */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';

const TOOLS = ['true', 'false', 'cat', 'id', 'printf', 'sleep', 'pwd', 'env', 'tty'];
const SOURCE = join(import.meta.dirname, 'musl-tools.c');

/** Why there can be none here. */
export function muslMissing(): string | undefined {
  if (loader() === undefined) return 'musl is missing (apt-get install musl-tools)';
  try {
    execFileSync('musl-gcc', ['--version'], { stdio: 'ignore' });
    return undefined;
  } catch {
    return 'musl-gcc is missing (apt-get install musl-tools)';
  }
}

/** Its loader, and those of the tools that have been compiled. `others`: names that lead to busybox. */
export function fillMusl(folder: string, others: readonly string[]): void {
  const bin = join(folder, 'usr/bin');
  for (const path of ['lib', 'usr/bin']) fs.mkdirSync(join(folder, path), { recursive: true });
  const from = loader()!;
  fs.copyFileSync(fs.realpathSync(from), join(folder, from));
  fs.chmodSync(join(folder, from), 0o755);
  const program = join(bin, 'musl-tools');
  execFileSync('musl-gcc', ['-O1', '-s', '-o', program, SOURCE]);
  const text = fs.readFileSync(program, 'latin1');
  if (!text.includes(from) || text.includes('GLIBC_')) throw new Error('musl-gcc has made no program of musl');
  for (const tool of TOOLS) fs.symlinkSync('musl-tools', join(bin, tool));
  fs.copyFileSync('/bin/busybox', join(bin, 'busybox'));
  fs.chmodSync(join(bin, 'busybox'), 0o755);
  for (const tool of others) if (!TOOLS.includes(tool)) fs.symlinkSync('busybox', join(bin, tool));
  fs.symlinkSync('usr/bin', join(folder, 'bin'));
}

/** The path that its programs name. */
function loader(): string | undefined {
  const name = fs.existsSync('/lib') && fs.readdirSync('/lib').find((one) => /^ld-musl-.*\.so\.1$/.test(one));
  return name ? `/lib/${name}` : undefined;
}
