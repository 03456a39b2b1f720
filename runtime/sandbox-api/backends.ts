/** What a sandbox that stays can live in. */
export const SANDBOX_BACKENDS = ['container', 'microvm', 'vm'] as const;
export type SandboxBackend = (typeof SANDBOX_BACKENDS)[number];
