/** What a sandbox lives in, as everybody is told: records name the launcher of a container instead. */
import { SANDBOX_BACKENDS, type SandboxBackend } from '#runtime';

export function backendOf({ backend }: { readonly backend?: string }): SandboxBackend {
  return SANDBOX_BACKENDS.find((name) => name === backend) ?? 'container';
}

/** `runtime`: of a container, what started it. */
export function backendView(record: { readonly backend: string }): {
  readonly backend: SandboxBackend;
  readonly runtime?: string;
} {
  const backend = backendOf(record);
  return backend === 'container' ? { backend, runtime: record.backend } : { backend };
}
