/** How a virtual machine's memory is kept small. A container has all of this from its kernel, and takes none of it. */
export interface MemoryOptions {
  /** Read-only layers on virtio-pmem, so that all machines of a host share one page cache. */
  readonly pmem?: boolean;
  /** Free pages go back to the host. */
  readonly reporting?: boolean;
  /** Cold file pages are given up in the guest. */
  readonly damon?: boolean;
}

export const MEMORY_OPTIONS = ['pmem', 'reporting', 'damon'] as const satisfies readonly (keyof MemoryOptions)[];
