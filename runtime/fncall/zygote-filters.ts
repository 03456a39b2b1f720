/**
 * A task's system call filter in two parts, for the interpreter that stays and its forks. To check, translate and compile the whole filter takes the kernel
 * half a millisecond of processor time for each process that asks for it; so the interpreter takes up all of it but the call that it needs itself, once, and
 * its forks have that from it. Each fork adds the rest, a few instructions, when it is in its namespaces. Of several filters the strictest answer counts, so
 * what a task may do is what the whole one says.
 */
import { seccompFilter } from '../backend/seccomp-filter.ts';
import type { SeccompProfile } from '../backend/seccomp-profile.ts';

/** By which a fork gets into the namespaces of its task, and the interpreter makes it there. */
const ENTERING = 'setns';

export interface ZygoteFilters {
  readonly wholeButSetns: Buffer;
  readonly setns: Buffer;
}

const made = new WeakMap<SeccompProfile, ZygoteFilters>();

/** Compiled once for each profile. */
export function zygoteFilters(profile: SeccompProfile): ZygoteFilters {
  const found = made.get(profile) ?? {
    wholeButSetns: seccompFilter(withoutEntering(profile)),
    setns: seccompFilter(enteringAlone(profile)),
  };
  made.set(profile, found);
  return found;
}

function withoutEntering(profile: SeccompProfile): SeccompProfile {
  const others = profile.syscalls.map((rule) => ({ ...rule, names: rule.names.filter((name) => name !== ENTERING) }));
  return { ...profile, syscalls: [{ names: [ENTERING], action: 'SCMP_ACT_ALLOW' }, ...others] };
}

function enteringAlone(profile: SeccompProfile): SeccompProfile {
  const rules = profile.syscalls.filter(({ names }) => names.includes(ENTERING));
  return {
    ...profile,
    defaultAction: 'SCMP_ACT_ALLOW',
    syscalls: rules.map((rule) => ({ ...rule, names: [ENTERING] })),
  };
}
