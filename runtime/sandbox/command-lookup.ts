/**
 * What a sandbox runs, and whether it can: argv from the image's Entrypoint and Cmd, and the program found in the root
 * the way execvp would, before anything starts. An OCI runtime's own message for a missing program does not tell it from
 * a program that exited with 1; found here, "not found" is 127 and "cannot be executed" 126, as from a shell, and a
 * script's missing interpreter or a program's missing loader (the usual surprise of mixed toolkits) is named.
 */
import { lstatSync, readdirSync, type Stats } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { dirname } from 'node:path';
import { fromText } from '#base';
import type { OciConfig } from '#imagesvc';
import { llistxattr } from '#linux';
import { fail } from '../errors.ts';
import { type RootPath, readHead, resolveInRoot } from './root-path.ts';
import type { ImageUser } from './user-lookup.ts';

/**
 * A given command replaces Cmd and keeps Entrypoint; a given entrypoint replaces both (an empty one removes it).
 * @throws RUNTIME_COMMAND_MISSING, RUNTIME_COMMAND_NOT_EXECUTABLE for what no program can be given
 */
export function commandOf(
  image: string,
  config: OciConfig,
  command: readonly string[],
  entrypoint: readonly string[] | undefined,
): string[] {
  const own = config.config ?? {};
  const args =
    entrypoint === undefined
      ? [...(own.Entrypoint ?? []), ...(command.length > 0 ? command : (own.Cmd ?? []))]
      : [...entrypoint.filter((part, index) => index > 0 || part !== ''), ...command];
  if (args.length === 0) throw fail('RUNTIME_COMMAND_MISSING', { image });
  const cut = args.findIndex((arg) => arg.includes('\0'));
  if (cut >= 0) {
    const reason = `argument ${cut} of ${image} holds a NUL byte`;
    throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command: JSON.stringify(args[0]), path: 'PATH', reason });
  }
  return args;
}

/**
 * Passes when `command` names something that exec could start.
 * @throws RUNTIME_COMMAND_NOT_FOUND, RUNTIME_COMMAND_NOT_EXECUTABLE
 */
export async function checkCommand(
  root: string,
  command: string,
  env: readonly string[],
  cwd: string,
  user: ImageUser,
): Promise<void> {
  if (command === '') throw fail('RUNTIME_COMMAND_NOT_FOUND', { command: '""', reason: 'the name is empty' });
  if (command.includes('/')) {
    const path = command.startsWith('/') ? command : `${cwd}/${command}`;
    const problem = await problemOf(root, path, user);
    if (problem !== undefined) throw refuse(command, path, problem);
    return;
  }
  const pathVariable = env.find((entry) => entry.startsWith('PATH='))?.slice('PATH='.length) ?? '';
  let refused: { path: string; problem: Problem } | undefined;
  for (const folder of pathVariable.split(':')) {
    const path = `${folder === '' ? cwd : folder.startsWith('/') ? folder : `${cwd}/${folder}`}/${command}`;
    const problem = await problemOf(root, path, user);
    if (problem === undefined) return;
    // execvp passes over what it may not execute, and ends at the first it may: also one whose interpreter is missing.
    if (problem.ends) throw refuse(command, path, problem);
    if (problem.exit === 126) refused ??= { path, problem };
  }
  if (refused !== undefined) throw refuse(command, refused.path, refused.problem);
  throw fail('RUNTIME_COMMAND_NOT_FOUND', { command, reason: `it is in no folder of PATH (${pathVariable})` });
}

interface Problem {
  readonly exit: 126 | 127;
  readonly reason: string;
  /** A search along PATH would end here. */
  readonly ends?: boolean;
}

function refuse(command: string, path: string, problem: Problem) {
  const row = problem.exit === 126 ? 'RUNTIME_COMMAND_NOT_EXECUTABLE' : 'RUNTIME_COMMAND_NOT_FOUND';
  return fail(row, { command, path, reason: problem.reason });
}

const MAX_HEAD = 256;

async function problemOf(root: string, path: string, user: ImageUser): Promise<Problem | undefined> {
  const found = resolveInRoot(root, path);
  if (found?.stat === undefined) return { exit: 127, reason: `there is no ${path} in the image` };
  if (found.stat.isDirectory()) return { exit: 126, reason: `${found.inside} is a directory` };
  if (!found.stat.isFile()) return { exit: 126, reason: `${found.inside} is not a regular file` };
  const denied = permissionProblem(root, found, found.stat, user);
  if (denied !== undefined) return { exit: 126, reason: denied };
  const head = readHead(found, MAX_HEAD);
  const unknown = formatProblem(head);
  if (unknown !== undefined) return { exit: 126, reason: `${found.inside} ${unknown}`, ends: true };
  const interpreter = scriptInterpreter(head) ?? (await programLoader(found.host, head));
  if (interpreter?.startsWith('/') === true && resolveInRoot(root, interpreter)?.stat === undefined) {
    const reason = `${found.inside} needs ${interpreter}, which is not in the image`;
    return { exit: 127, reason, ends: true };
  }
  return undefined;
}

function permissionProblem(root: string, found: RootPath, stat: Stats, user: ImageUser): string | undefined {
  if ((stat.mode & 0o111) === 0) return `${found.inside} has no execute permission`;
  if (!mayExecute(found.host, stat, user)) return `user ${user.uid} may not execute ${found.inside}`;
  for (let folder = dirname(found.host); folder.length >= root.length; folder = dirname(folder)) {
    if (!mayExecute(folder, lstatSync(folder), user))
      return `user ${user.uid} may not enter ${folder.slice(root.length) || '/'}`;
  }
  return undefined;
}

/** An ACL may say otherwise than the mode: then the kernel decides. */
function mayExecute(host: string, stat: Stats, user: ImageUser): boolean {
  if (user.uid === 0) return true;
  const group = stat.gid === user.gid || user.additionalGids.includes(stat.gid);
  const bit = stat.uid === user.uid ? 0o100 : group ? 0o010 : 0o001;
  return (stat.mode & bit) !== 0 || llistxattr(fromText(host)).includes('system.posix_acl_access');
}

const ELF_MAGIC = 0x7f454c46;
/** e_machine: this processor, and its 32-bit programs. */
const MACHINES: Readonly<Record<string, readonly number[]>> = { x64: [62, 3], arm64: [183, 40] };

/** What exec answers with ENOEXEC, unless formats were registered with the kernel (emulators of other processors). */
function formatProblem(head: Buffer): string | undefined {
  if (head.length >= 2 && head[0] === 0x23 && head[1] === 0x21) return undefined;
  const isElf = head.length >= 20 && head.readUInt32BE(0) === ELF_MAGIC;
  const machine = isElf ? (head[5] === 2 ? head.readUInt16BE(18) : head.readUInt16LE(18)) : undefined;
  if (machine !== undefined && MACHINES[process.arch]?.includes(machine) !== false) return undefined;
  if (otherFormats()) return undefined;
  return isElf ? 'is a program for another processor' : 'is neither a program nor a script that begins with #!';
}

function otherFormats(): boolean {
  try {
    return readdirSync('/proc/sys/fs/binfmt_misc').some((name) => name !== 'register' && name !== 'status');
  } catch {
    return false;
  }
}

function scriptInterpreter(head: Buffer): string | undefined {
  if (head.length < 3 || head[0] !== 0x23 || head[1] !== 0x21) return undefined;
  const line = head.toString('latin1', 2).split('\n')[0]!.trim();
  const name = line.split(/[ \t\0]/)[0]!;
  return name === '' ? undefined : Buffer.from(name, 'latin1').toString('utf8');
}

const PT_INTERP = 3;

/** PT_INTERP of a 64-bit little-endian ELF program; others are left to the kernel. */
async function programLoader(host: string, head: Buffer): Promise<string | undefined> {
  if (head.length < 64 || head.readUInt32BE(0) !== ELF_MAGIC || head[4] !== 2 || head[5] !== 1) return undefined;
  const tableOffset = Number(head.readBigUInt64LE(32));
  const entrySize = head.readUInt16LE(54);
  const count = head.readUInt16LE(56);
  if (entrySize !== 56 || count > 256 || !Number.isSafeInteger(tableOffset)) return undefined;
  let file: FileHandle | undefined;
  try {
    file = await open(host, 'r');
    const table = Buffer.alloc(entrySize * count);
    if ((await file.read(table, 0, table.length, tableOffset)).bytesRead < table.length) return undefined;
    for (let at = 0; at < table.length; at += entrySize) {
      if (table.readUInt32LE(at) !== PT_INTERP) continue;
      const offset = Number(table.readBigUInt64LE(at + 8));
      const size = Number(table.readBigUInt64LE(at + 32));
      if (size === 0 || size > 4096 || !Number.isSafeInteger(offset)) return undefined;
      const name = Buffer.alloc(size);
      const { bytesRead } = await file.read(name, 0, size, offset);
      return name.toString('utf8', 0, bytesRead).replace(/\0.*$/s, '');
    }
    return undefined;
  } finally {
    await file?.close();
  }
}
