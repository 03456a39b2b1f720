/**
 * What a command must find and what must come of it, as a table: the same on every backend, in a sandbox of its own (`dsec run`) and in one
 * that stays (`dsec sandbox exec`). `shell`: only where the image has one.
 */
import type { TestImage } from './resident-images.ts';

export interface CommandCase {
  readonly name: string;
  readonly shell?: boolean;
  readonly args: (image: TestImage) => string[];
  readonly env?: readonly string[];
  readonly cwd?: string;
  readonly user?: string;
  readonly stdin?: Buffer;
  readonly exitCode?: number;
  readonly stdout?: string | Buffer | RegExp;
  readonly stderr?: string | RegExp;
  /** In place of an exit. */
  readonly error?: string;
}

const bytes = Buffer.alloc(1 << 20, Buffer.from(Array.from({ length: 256 }, (_, value) => value)));
const sh = (script: string) => () => ['sh', '-c', script];

export const COMMAND_CASES: readonly CommandCase[] = [
  { name: 'exits with 0', args: (image) => image.tool('true'), exitCode: 0, stdout: '', stderr: '' },
  { name: 'exits with 1', args: (image) => image.tool('false'), exitCode: 1 },
  { name: 'exits with 255', shell: true, args: sh('exit 255'), exitCode: 255 },
  {
    name: 'has its arguments to the byte',
    args: (image) => image.tool('printf', '<%s>', 'a b', '', '\'"\\$x`', 'ü\n\t', '-n', '*'),
    stdout: '<a b><><\'"\\$x`><ü\n\t><-n><*>',
  },
  {
    name: 'has its environment to the byte',
    args: (image) => image.tool('env'),
    env: ['ODD==a\nb\'"$x ', 'EMPTY='],
    stdout: /^ODD==a\nb'"\$x $/m,
  },
  { name: 'starts where it is told', args: (image) => image.tool('pwd'), cwd: '/work', stdout: '/work\n' },
  { name: 'is root by default', args: (image) => image.tool('id', '-u'), stdout: '0\n' },
  { name: 'is a user by name', args: (image) => image.tool('id', '-u'), user: 'agent', stdout: '1000\n' },
  {
    name: 'is in the groups of its user',
    args: (image) => image.tool('id', '-G'),
    user: 'agent',
    stdout: '1000 1001\n',
  },
  { name: 'is a user by number', args: (image) => image.tool('id', '-u'), user: '4711', stdout: '4711\n' },
  { name: 'is of a group by number', args: (image) => image.tool('id', '-g'), user: 'agent:42', stdout: '42\n' },
  {
    name: 'has the home of its user',
    args: (image) => image.tool('env'),
    user: 'agent',
    stdout: /^HOME=\/home\/agent$/m,
  },
  {
    name: 'is refused for an unknown user',
    args: (image) => image.tool('true'),
    user: 'nobody-here',
    error: 'RUNTIME_USER',
  },
  { name: 'gets its input to the byte, and its end', args: (image) => image.tool('cat'), stdin: bytes, stdout: bytes },
  {
    name: 'has stdout and stderr apart',
    shell: true,
    args: sh('echo out; echo err >&2'),
    stdout: 'out\n',
    stderr: 'err\n',
  },
  {
    name: 'may open its own standard streams',
    shell: true,
    args: sh('echo a > /dev/stdout; echo b > /dev/stderr'),
    stdout: 'a\n',
    stderr: 'b\n',
  },
  {
    name: 'may do so as a user',
    shell: true,
    user: 'agent',
    args: sh('echo a > /dev/stdout; echo b > /dev/stderr'),
    stdout: 'a\n',
    stderr: 'b\n',
  },
  { name: 'is ended by its own signal', shell: true, args: sh('sh -c "kill -9 \\$\\$"; exit $?'), exitCode: 137 },
  { name: 'is not found', args: () => ['no-such-program'], error: 'RUNTIME_COMMAND_NOT_FOUND' },
  { name: 'cannot be executed', args: () => ['/etc/passwd'], error: 'RUNTIME_COMMAND_NOT_EXECUTABLE' },
];
