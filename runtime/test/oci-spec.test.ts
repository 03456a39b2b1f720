import { describe, expect, it } from 'vitest';
import type { LaunchSpec } from '../backend/backend.ts';
import { ociSpec } from '../backend/oci-spec.ts';
import { defaultSeccompProfile } from '../backend/seccomp-profile.ts';

const spec = (uid: number, network: 'none' | 'host' = 'none'): LaunchSpec => ({
  id: 'x-1',
  folder: '/f',
  root: '/r',
  hostname: 'x',
  network,
  binds: [],
  process: { args: ['a'], env: [], cwd: '/', uid, gid: 0, additionalGids: [], terminal: false },
  stdio: 'pipe',
});

interface Shape {
  process: { capabilities: Record<string, string[]>; rlimits: { type: string; soft: number; hard: number }[] };
  linux: { namespaces: { type: string }[]; cgroupsPath: string };
}
const shape = (of: LaunchSpec) => JSON.parse(JSON.stringify(ociSpec(of))) as Shape;

describe('config.json', () => {
  it('gives capabilities to root alone, never what administers the machine', () => {
    const { bounding, effective } = shape(spec(0)).process.capabilities;
    expect(effective).toEqual(bounding);
    expect(bounding!.filter((name) => /ADMIN|PTRACE|MODULE|RAWIO|BPF|RESOURCE|TIME|BOOT/.test(name))).toEqual([]);
    expect(shape(spec(1000)).process.capabilities).toMatchObject({
      effective: [],
      permitted: [],
      inheritable: [],
      ambient: [],
    });
  });

  it('shares no namespace but the host’s network when asked', () => {
    const types = (of: LaunchSpec) => shape(of).linux.namespaces.map(({ type }) => type);
    expect(types(spec(0))).toEqual(['pid', 'mount', 'ipc', 'uts', 'network']);
    expect(types(spec(0, 'host'))).toEqual(['pid', 'mount', 'ipc', 'uts']);
  });

  it('never asks for more than the hard limits allow', () => {
    for (const { soft, hard } of shape(spec(0)).process.rlimits) expect(soft).toBeLessThanOrEqual(hard);
  });
});

describe('the system call filter', () => {
  it('names each call once, except those it looks into', () => {
    const names = defaultSeccompProfile().syscalls.flatMap((rule) => (rule.args === undefined ? rule.names : []));
    expect(names.filter((name, index) => names.indexOf(name) !== index)).toEqual([]);
    const conditional = defaultSeccompProfile().syscalls.flatMap((rule) => (rule.args === undefined ? [] : rule.names));
    expect(conditional.filter((name) => names.includes(name))).toEqual([]);
  });

  it('allows nothing that administers the machine, and leaves clone3 unknown', () => {
    const allowed = new Set(
      defaultSeccompProfile().syscalls.flatMap((rule) =>
        rule.action === 'SCMP_ACT_ALLOW' && !rule.args ? rule.names : [],
      ),
    );
    const never = [
      'mount',
      'umount2',
      'setns',
      'unshare',
      'bpf',
      'init_module',
      'kexec_load',
      'keyctl',
      'io_uring_setup',
      'userfaultfd',
      'open_by_handle_at',
      'clone3',
      'clone',
      'socket',
      'personality',
      'reboot',
      'swapon',
      'process_vm_writev',
      'pidfd_getfd',
    ];
    expect(never.filter((name) => allowed.has(name))).toEqual([]);
    expect(defaultSeccompProfile()).toMatchObject({ defaultAction: 'SCMP_ACT_ERRNO', defaultErrnoRet: 38 });
  });
});
