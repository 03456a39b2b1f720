/**
 * A command of a guest with an environment, a user or a folder of its own. The guest agent has no such things: it runs programs as what it is itself. So the
 * guest's own shell enters the folder, its `setpriv`, `chroot` (of coreutils) or `su` becomes the user, `env` sets variables. All of it goes in arguments:
 * nothing is quoted, and no byte of them is read as anything else.
 *
 * Whether that can be is asked first, by a command of its own, so that what cannot be begun is refused and looks like no command that failed.
 */
import { isUtf8 } from 'node:buffer';
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError } from '#base';
import { fail } from '../../errors.ts';
import { type ImageUser, userFrom } from '../../sandbox/user-lookup.ts';
import type { ExecSpec } from '../../sandbox-api/exec.ts';
import type { SandboxFiles } from '../../sandbox-api/files.ts';
import { isObject } from '../qemu/monitor.ts';
import { type GuestAgent, GuestRefusal } from './guest-agent.ts';

export interface GuestCommandHost {
  /** Of the machine, for errors. */
  readonly id: string;
  readonly agent: Pick<GuestAgent, 'ask'>;
  readonly files: Pick<SandboxFiles, 'read'>;
}

const SHELL = '/bin/sh';
/** They are read for each command, and a guest writes them: more would keep others waiting. */
const ACCOUNT_FILE_BYTES = 4 << 20;
const ANSWER_MS = 60_000;
const FIRST_LOOK_MS = 20;
const LAST_LOOK_MS = 500;

/**
 * Folder, command, PATH, user's number, group's, option of its groups, list of them, name. Says a word: what it lacks, or how it becomes the user, with the path
 * of that program: the shell of some guests has programs of these names in itself that can do less.
 */
const ASK = `
program() { (IFS=:; for folder in $PATH; do [ -x "$folder/$1" ] && echo "$folder/$1" && exit; done; exit 1); }
if [ -n "$1" ] && ! cd "$1" 2>/dev/null; then echo folder; exit; fi
if ! (PATH=\${3:-$PATH}; command -v "$2") >/dev/null 2>&1; then echo command; exit; fi
if ! program env >/dev/null; then echo env; exit; fi
if [ -z "$4" ]; then echo same
elif tool=$(program setpriv) && "$tool" "--reuid=$4" "--regid=$5" "$6" true >/dev/null 2>&1; then echo "setpriv $tool"
elif tool=$(program chroot) && "$tool" --skip-chdir "--userspec=$4:$5" "--groups=$7" / true >/dev/null 2>&1; then echo "chroot $tool"
elif [ -n "$8" ] && tool=$(program su) && "$tool" -s ${SHELL} -c true -- "$8" </dev/null >/dev/null 2>&1; then echo "su $tool"
else echo user; fi`;
/** The folder, then what is run in it. */
const BEGIN = '[ -z "$1" ] || cd "$1" || exit; shift; exec "$@"';
const EXEC = 'exec "$@"';

/** The arguments of what the agent is to run. @throws RUNTIME_USER, RUNTIME_ENV, RUNTIME_COMMAND_*, VM_GUEST_TOOL, VM_GUEST_AGENT */
export async function guestCommand(host: GuestCommandHost, spec: ExecSpec): Promise<string[]> {
  const args = spec.args.map((arg) => textOf(String(spec.args[0]), arg));
  const { env = [], cwd, user } = spec;
  if (env.length === 0 && cwd === undefined && user === undefined) return args;
  const command = args[0] ?? '';
  const wanted = user === undefined ? undefined : await accountOf(host, user);
  const entries = [
    ...(wanted === undefined ? [] : [`HOME=${wanted.account.home}`]),
    ...env.flatMap((entry) => entryOf(command, entry)),
  ];
  const folder = cwd === undefined ? '' : cwd.startsWith('/') ? cwd : `/${cwd}`;
  for (const part of [...args, folder]) {
    if (!part.includes('\0')) continue;
    const reason = 'an argument, variable or folder holds a NUL byte';
    throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command, path: 'PATH', reason });
  }
  const path = entries.findLast((entry) => entry.startsWith('PATH='))?.slice('PATH='.length) ?? '';
  const groups = wanted?.account.additionalGids.join(',') ?? '';
  const groupsOption = groups === '' ? '--clear-groups' : `--groups=${groups}`;
  const numbers = wanted === undefined ? ['', ''] : [String(wanted.account.uid), String(wanted.account.gid)];
  const [uid = '', gid = ''] = numbers;
  const [said = '', tool = ''] = wordsOf(
    await ask(host, [folder, command, path, uid, gid, groupsOption, groups, wanted?.name ?? '']),
  );
  const ways: ReadonlyMap<string, readonly string[]> = new Map([
    ['same', []],
    ['setpriv', [tool, `--reuid=${uid}`, `--regid=${gid}`, groupsOption]],
    ['chroot', [tool, '--skip-chdir', `--userspec=${uid}:${gid}`, `--groups=${groups}`, '/']],
    ['su', [tool, '-s', SHELL, '-c', EXEC, '--', wanted?.name ?? '', 'sh']],
  ]);
  const way = ways.get(said);
  if (way === undefined) throw refusal(host, said, command, folder);
  return [SHELL, '-c', BEGIN, 'sh', folder, ...way, 'env', '--', ...entries, SHELL, '-c', EXEC, 'sh', ...args];
}

function refusal({ id }: GuestCommandHost, said: string, command: string, folder: string): Error {
  switch (said) {
    case 'folder':
      return fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command, path: 'PATH', reason: `there is no folder ${folder}` });
    case 'command':
      return fail('RUNTIME_COMMAND_NOT_FOUND', { command, reason: 'no such file or directory' });
    case 'env':
      return fail('VM_GUEST_TOOL', { id, what: 'variables', tools: 'env' });
    case 'user':
      return fail('VM_GUEST_TOOL', {
        id,
        what: 'another user',
        tools: 'setpriv of util-linux, chroot of coreutils, or su',
      });
    default:
      return fail('VM_GUEST_AGENT', { id, command: SHELL, problem: 'an answer that is none' });
  }
}

/** The first word, and the rest. */
function wordsOf(line: string): string[] {
  const [word = '', ...rest] = line.split(' ');
  return [word, rest.join(' ')];
}

interface Account {
  readonly account: ImageUser;
  /** In its files, where it is asked for with its own groups: what `su` takes. */
  readonly name: string | undefined;
}

/** Of the guest's own files. @throws RUNTIME_USER */
async function accountOf({ files }: GuestCommandHost, user: string): Promise<Account> {
  const text = async (path: string) => {
    try {
      return (await files.read(path, ACCOUNT_FILE_BYTES)).toString('utf8');
    } catch (error) {
      if (isDsecError(error, 'RUNTIME_FILE')) return '';
      throw error;
    }
  };
  const account = userFrom(await text('/etc/passwd'), await text('/etc/group'), user);
  return { account, name: user.includes(':') ? undefined : account.name };
}

/** The word that the guest's shell says. @throws VM_GUEST_TOOL, VM_GUEST_AGENT */
async function ask({ id, agent }: GuestCommandHost, args: readonly string[]): Promise<string> {
  const broken = (problem: string) => fail('VM_GUEST_AGENT', { id, command: SHELL, problem });
  let begun: unknown;
  try {
    begun = await agent.ask('guest-exec', { path: SHELL, arg: ['-c', ASK, 'sh', ...args], 'capture-output': true });
  } catch (error) {
    if (!(error instanceof GuestRefusal)) throw error;
    throw fail('VM_GUEST_TOOL', { id, what: 'an environment, a user or a folder', tools: SHELL }, error);
  }
  const pid = isObject(begun) ? begun.pid : undefined;
  if (typeof pid !== 'number') throw broken('an answer without a process');
  const until = performance.now() + ANSWER_MS;
  for (let pause = FIRST_LOOK_MS; ; pause = Math.min(LAST_LOOK_MS, pause * 1.5)) {
    await delay(pause);
    const status = await agent.ask('guest-exec-status', { pid }).catch((error) => {
      throw error instanceof GuestRefusal ? broken(error.message) : error;
    });
    if (isObject(status) && status.exited === true) {
      const text = status['out-data'];
      return typeof text === 'string' ? Buffer.from(text, 'base64').toString('latin1').trim() : '';
    }
    if (performance.now() > until) throw broken('it does not say what it has');
  }
}

/** `NAME=VALUE`; one without a value is that of nobody here. @throws RUNTIME_ENV */
function entryOf(command: string, entry: string | Buffer): string[] {
  const text = textOf(command, entry);
  const name = text.split('=', 1)[0]!;
  if (name === '') throw fail('RUNTIME_ENV', { entry: `"${text}"`, problem: 'it has no name' });
  if (text.includes('\0')) throw fail('RUNTIME_ENV', { entry: name, problem: 'it holds a NUL byte' });
  return text.includes('=') ? [text] : [];
}

/** What the agent is told is JSON. @throws RUNTIME_COMMAND_NOT_EXECUTABLE */
function textOf(command: string, bytes: string | Buffer): string {
  if (typeof bytes === 'string') return bytes;
  if (isUtf8(bytes)) return bytes.toString('utf8');
  const reason = 'the guest agent takes arguments and variables in UTF-8 alone';
  throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command, path: 'PATH', reason });
}
