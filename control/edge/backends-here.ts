/**
 * Which backends this machine has, each with how many sandboxes of it an edge takes. What was missing is looked for again, so that a kernel or a QEMU that is
 * installed later counts without another start; what was found stays, as its sandboxes do.
 */
import { fullVmProblem, microvmSupport, type SandboxBackend } from '#runtime';

/** A look costs a few file system calls, and reports are asked for every second. */
const AGAIN_MS = 5000;

export interface BackendsOptions {
  /** Of each backend. */
  readonly sandboxes: number;
  /** Where sandboxes' changes lie. */
  readonly stateDir: string;
  /** For tests. */
  readonly now?: () => number;
  readonly isHere?: (backend: SandboxBackend) => boolean;
}

export class BackendsHere {
  private readonly found = new Map<string, number>();
  private readonly options: BackendsOptions;
  private lookedAt = Number.NEGATIVE_INFINITY;

  constructor(options: BackendsOptions) {
    this.options = options;
  }

  get limits(): ReadonlyMap<string, number> {
    const {
      sandboxes,
      stateDir,
      now = Date.now,
      isHere = (backend) => isBackendHere(backend, stateDir),
    } = this.options;
    const at = now();
    if (this.found.size === BACKENDS.length || at - this.lookedAt < AGAIN_MS) return this.found;
    this.lookedAt = at;
    for (const backend of BACKENDS) {
      if (!this.found.has(backend) && isHere(backend)) this.found.set(backend, sandboxes);
    }
    return this.found;
  }
}

const BACKENDS: readonly SandboxBackend[] = ['container', 'microvm', 'vm'];

function isBackendHere(backend: SandboxBackend, stateDir: string): boolean {
  if (backend === 'microvm') return microvmSupport(stateDir, { probe: false }).problem === undefined;
  if (backend === 'vm') return fullVmProblem() === undefined;
  return true;
}
