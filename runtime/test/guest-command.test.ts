/** Commands of a guest with an environment, a user and a folder of their own: what the guest agent is told to run, run here as it would run it. */
import { execFile, execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { userFrom } from '../sandbox/user-lookup.ts';
import type { ExecSpec } from '../sandbox-api/exec.ts';
import { GuestRefusal } from '../vm/full/guest-agent.ts';
import { type GuestCommandHost, guestCommand } from '../vm/full/guest-command.ts';

const BUSYBOX = '/bin/busybox';
const canRun = process.getuid?.() === 0 && fs.existsSync(BUSYBOX);
if (!canRun) console.log('skipped: not root, or no busybox');
const PASSWD = 'root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n';
const GROUP = 'root:x:0:\ndaemon:x:1:nobody\nnogroup:x:65534:\n';
const TELL = 'printf "%s|%s|%s|" "$ODD" "$HOME" "$PWD"; printf "<%s>" "$@"; printf "|"; id -u; id -g; id -G';

/** Programs that a guest has: these of this machine, and busybox for the rest. */
function toolsIn(folder: string, programs: readonly string[], applets: readonly string[]): string {
  fs.mkdirSync(folder);
  for (const name of programs) {
    const place = ['/usr/bin', '/usr/sbin'].find((one) => fs.existsSync(join(one, name)));
    fs.symlinkSync(join(place!, name), join(folder, name));
  }
  for (const name of applets) fs.symlinkSync(BUSYBOX, join(folder, name));
  return folder;
}

describe.skipIf(!canRun)('a command of a guest', () => {
  let folder: string;
  const guests: Record<string, string> = {};

  beforeAll(() => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-guest-command-'));
    fs.chmodSync(folder, 0o755);
    guests.setpriv = toolsIn(join(folder, 'setpriv'), ['setpriv', 'env', 'id', 'true'], ['sh']);
    guests.chroot = toolsIn(join(folder, 'chroot'), ['chroot', 'env', 'id', 'true'], ['sh', 'setpriv']);
    guests.su = toolsIn(join(folder, 'su'), [], ['su', 'sh', 'env', 'id', 'true', 'chroot', 'setpriv']);
    guests.none = toolsIn(join(folder, 'none'), [], ['sh', 'env', 'id', 'true']);
  });
  afterAll(() => fs.rmSync(folder, { recursive: true, force: true }));

  /** As qemu-ga runs it, with that PATH. */
  const execute = (path: string, args: readonly string[], tools: string) =>
    new Promise<{ code: number; out: Buffer }>((resolve) => {
      const env = { PATH: tools, HOME: '/root' };
      const child = execFile(path, args, { env, cwd: '/', encoding: 'buffer' }, (error, out) => {
        resolve({ code: error === null ? 0 : Number(error.code), out });
      });
      child.stdin?.end();
    });

  function hostOf(tools: string): GuestCommandHost {
    const ended: Awaited<ReturnType<typeof execute>>[] = [];
    return {
      id: 'desk',
      agent: {
        async ask(command, args = {}) {
          const { path, arg, pid } = args as { path: string; arg: string[]; pid: number };
          if (command === 'guest-exec') return { pid: ended.push(await execute(path, arg, tools)) };
          return { exited: true, exitcode: ended[pid - 1]!.code, 'out-data': ended[pid - 1]!.out.toString('base64') };
        },
      },
      files: { read: async (path) => Buffer.from(path === '/etc/passwd' ? PASSWD : GROUP) },
    };
  }
  async function run(guest: string, spec: Partial<ExecSpec>): Promise<string> {
    const tools = guests[guest]!;
    const args = ['sh', '-c', TELL, 'sh', "it's", '$(x) \\', ' a\n', ''];
    const [path, ...rest] = await guestCommand(hostOf(tools), { args, ...spec });
    const { code, out } = await execute(path === 'sh' ? join(tools, 'sh') : path!, rest, tools);
    expect(code).toBe(0);
    return out.toString();
  }
  const WORDS = "<it's><$(x) \\>< a\n><>";

  it('is run as it is when nothing of it is asked for', async () => {
    expect(await guestCommand(hostOf('/none'), { args: ['a', 'b c'] })).toEqual(['a', 'b c']);
  });

  it.each(['setpriv', 'chroot', 'su'])('has its variables, folder and user in a guest with %s', async (guest) => {
    const odd = ' "two"\n=lines\'$ä\\ ';
    expect(await run(guest, { env: [`ODD=${odd}`, 'NAME'], cwd: 'usr/share' })).toBe(
      `${odd}|/root|/usr/share|${WORDS}|0\n0\n${execFileSync('id', ['-G'], { encoding: 'utf8' })}`,
    );
    // Of `su` the groups are those of this machine's own files.
    const groups = guest === 'su' ? execFileSync('id', ['-G', 'nobody'], { encoding: 'utf8' }) : '65534 1\n';
    expect(await run(guest, { user: 'nobody', env: [Buffer.from('ODD=-')], cwd: '/' })).toBe(
      `-|/nonexistent|/|${WORDS}|65534\n65534\n${groups}`,
    );
  });

  it.each(['setpriv', 'chroot'])('is of any number and group in a guest with %s', async (guest) => {
    expect(await run(guest, { user: '4711:42', env: ['HOME=/tmp'], cwd: '/tmp' })).toBe(
      `|/tmp|/tmp|${WORDS}|4711\n42\n42\n`,
    );
  });

  it('takes commands whose names look like something else', async () => {
    const odd = join(folder, 'a=b c');
    fs.writeFileSync(odd, '#!/bin/sh\necho "$1:$X"\n', { mode: 0o755 });
    const [path, ...rest] = await guestCommand(hostOf(guests.setpriv!), { args: [odd, '-x'], env: ['X=1'] });
    expect(String((await execute(path!, rest, guests.setpriv!)).out)).toBe('-x:1\n');
    const spec = { args: ['a=b c', '-y'], env: [`PATH=${folder}`, 'X=2'] };
    const [found, ...more] = await guestCommand(hostOf(guests.setpriv!), spec);
    expect(String((await execute(found!, more, guests.setpriv!)).out)).toBe('-y:2\n');
  });

  it('is refused when its guest says a word that is none, whatever that is the name of', async () => {
    for (const word of ['constructor /bin/x', '__proto__', 'toString', '']) {
      const ask: GuestCommandHost['agent']['ask'] = async (command) =>
        command === 'guest-exec'
          ? { pid: 1 }
          : { exited: true, exitcode: 0, 'out-data': Buffer.from(word).toString('base64') };
      const asked = guestCommand({ ...hostOf('/none'), agent: { ask } }, { args: ['true'], cwd: '/' });
      await expect(asked, word).rejects.toMatchObject({ code: 'VM_GUEST_AGENT' });
    }
  });

  it('reads no more of its accounts than any guest has', async () => {
    const limits: (number | undefined)[] = [];
    const files: GuestCommandHost['files'] = {
      async read(path, limitBytes) {
        limits.push(limitBytes);
        return Buffer.from(path === '/etc/passwd' ? PASSWD : GROUP);
      },
    };
    await guestCommand({ ...hostOf(guests.setpriv!), files }, { args: ['true'], user: 'nobody' });
    expect(limits).toEqual([4 << 20, 4 << 20]);
  });

  it('is refused before it begins, each with its reason', async () => {
    const refused: readonly [string, Partial<ExecSpec>, string][] = [
      ['setpriv', { user: 'nobody-here' }, 'RUNTIME_USER'],
      ['setpriv', { cwd: '/none' }, 'RUNTIME_COMMAND_NOT_EXECUTABLE'],
      ['setpriv', { cwd: '/a\0b' }, 'RUNTIME_COMMAND_NOT_EXECUTABLE'],
      ['setpriv', { args: ['no-such-program'], cwd: '/' }, 'RUNTIME_COMMAND_NOT_FOUND'],
      ['setpriv', { args: ['sh'], env: ['PATH=/none'] }, 'RUNTIME_COMMAND_NOT_FOUND'],
      ['setpriv', { env: ['=x'] }, 'RUNTIME_ENV'],
      ['setpriv', { env: [Buffer.from([0x41, 0x3d, 0xff])] }, 'RUNTIME_COMMAND_NOT_EXECUTABLE'],
      ['setpriv', { args: [Buffer.from([0xff])] }, 'RUNTIME_COMMAND_NOT_EXECUTABLE'],
      ['su', { user: '4711' }, 'VM_GUEST_TOOL'],
      ['su', { user: 'nobody:1' }, 'VM_GUEST_TOOL'],
      ['none', { user: 'nobody' }, 'VM_GUEST_TOOL'],
    ];
    for (const [guest, more, code] of refused) {
      const asked = guestCommand(hostOf(guests[guest]!), { args: ['true'], ...more });
      await expect(asked, JSON.stringify(more)).rejects.toMatchObject({ code });
    }
    const windows: GuestCommandHost = {
      ...hostOf('/none'),
      agent: { ask: () => Promise.reject(new GuestRefusal('Failed to execute child process: not found')) },
    };
    await expect(guestCommand(windows, { args: ['cmd.exe'], env: ['A=1'] })).rejects.toMatchObject({
      code: 'VM_GUEST_TOOL',
      params: { tools: '/bin/sh' },
    });
  });
});

it('accounts are those of the first row that has the name, else the number', () => {
  const passwd =
    '\n\nbad:x:-:1::/bad:\n:x:7:7::/none:\none:x:7:8::/one:/bin/sh:more\ntwo:x:7:9::/two:\n7:x:10:11\none:x:12:13::/later:';
  const group = '\nodd:x\nothers:x:20: one ,two\nnone:x:21:oneself\nagain:x:20:one\nown:x:8:one\nothers:x:30:\n';
  const one = { uid: 7, gid: 8, additionalGids: [20], home: '/one', name: 'one' };
  expect(userFrom(passwd, group, 'one')).toEqual(one);
  expect(userFrom(passwd, group, '007')).toEqual(one);
  expect(userFrom(passwd, group, 'one:others')).toEqual({ ...one, gid: 20, additionalGids: [] });
  // A number that is a name.
  expect(userFrom(passwd, group, '7')).toEqual({ uid: 10, gid: 11, additionalGids: [], home: '/', name: '7' });
  expect(userFrom(passwd, group, '99:21')).toEqual({
    uid: 99,
    gid: 21,
    additionalGids: [],
    home: '/',
    name: undefined,
  });
  expect(userFrom('', '', '')).toEqual({ uid: 0, gid: 0, additionalGids: [], home: '/', name: undefined });
  for (const user of ['bad', 'one:odd', 'one:', ':1', '4294967295']) {
    expect(() => userFrom(passwd, group, user), user).toThrow(expect.objectContaining({ code: 'RUNTIME_USER' }));
  }
});
