/**
 * AppArmor, where the kernel has it: one profile for all sandboxes, made here, loaded by apparmor_parser once per boot, and taken on by the exec of
 * the agent or the command. It forbids again what mounts, capabilities and the system call filter forbid already, in a part of the
 * kernel that has nothing to do with them: mounts, writes to what administers the kernel, and signals and traces across sandboxes' edges.
 *
 * Its name has the hash of its text, so that another version of it is another profile.
 */
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { messageOf } from '#base';

const RULES = `
  file,
  capability,
  network,
  signal (send, receive) peer=@{profile_name},
  signal (receive) peer=unconfined,
  ptrace (trace, read, tracedby, readby) peer=@{profile_name},
  unix,

  deny mount,
  deny umount,
  deny pivot_root,
  deny /proc/sys/** wkl,
  deny /proc/sysrq-trigger rwklx,
  deny /proc/kcore rwklx,
  deny /proc/kmem rwklx,
  deny /proc/kpage* rwklx,
  deny /proc/kmsg rwklx,
  deny /proc/acpi/** wklx,
  deny /sys/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/debug/** rwklx,
  deny /sys/kernel/security/** rwklx,
`;

/** As apparmor_parser reads it. */
export function sandboxProfile(): { readonly name: string; readonly text: string } {
  const name = `dsec-sandbox-${createHash('sha256').update(RULES).digest('hex').slice(0, 8)}`;
  const rules = RULES.replaceAll('@{profile_name}', name);
  return { name, text: `profile ${name} flags=(attach_disconnected,mediate_deleted) {${rules}}\n` };
}

const ENABLED = '/sys/module/apparmor/parameters/enabled';
const LOADED = '/sys/kernel/security/apparmor/profiles';
const PARSERS = ['/usr/sbin/apparmor_parser', '/sbin/apparmor_parser', '/usr/local/sbin/apparmor_parser'];

export interface AppArmor {
  /** Undefined: sandboxes have none. */
  readonly profile?: string;
  /** Why not. */
  readonly lacks?: string;
}

let found: AppArmor | undefined;

/** The profile that sandboxes get, loaded. As root; asked once a process. */
export function appArmor(): AppArmor {
  found ??= load();
  return found;
}

function load(): AppArmor {
  if (read(ENABLED).trim() !== 'Y') return { lacks: 'this kernel has none, or it is switched off' };
  const { name, text } = sandboxProfile();
  if (isLoaded(name)) return { profile: name };
  const parser = PARSERS.find((path) => existsSync(path));
  if (parser === undefined) return { lacks: 'apparmor_parser is not there: apt-get install apparmor' };
  try {
    execFileSync(parser, ['--replace', '--skip-cache'], { input: text, stdio: ['pipe', 'pipe', 'pipe'] });
  } catch (error) {
    return { lacks: `its profile cannot be loaded: ${messageOf(error).replace(/\s+/g, ' ').trim()}` };
  }
  return isLoaded(name) ? { profile: name } : { lacks: 'the kernel does not list its profile' };
}

function isLoaded(name: string): boolean {
  return read(LOADED)
    .split('\n')
    .some((line) => line.startsWith(`${name} `));
}

function read(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}
