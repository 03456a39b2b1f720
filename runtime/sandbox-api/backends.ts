/** What a sandbox that stays can live in. */
export const SANDBOX_BACKENDS = ['container', 'microvm', 'vm'] as const;
export type SandboxBackend = (typeof SANDBOX_BACKENDS)[number];

/** What a virtual machine has when nothing else is said, or less where the node is smaller. */
export const MACHINE_SIZES = {
  microvm: { cpus: 2, memoryBytes: 2 ** 30 },
  vm: { cpus: 1, memoryBytes: 2 ** 30 },
} as const;
