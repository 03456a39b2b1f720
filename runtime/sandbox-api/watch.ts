/** What happens to files of a sandbox, as it happens. What could not be told is said to be missing (`overflow`); nothing is left out silently. */

export const FILE_EVENTS = [
  'made',
  /** Its content, while it is open. */
  'changed',
  /** It was open for writing, and is closed. */
  'written',
  'removed',
  /** Both have the same `cookie` when both ends are watched. */
  'moved-from',
  'moved-to',
  /** Mode, owner, times, names. */
  'attributes',
  /** Events were lost: look at what is there. */
  'overflow',
  /** What was watched has been removed or renamed; the last event. */
  'gone',
] as const;

export type FileEventName = (typeof FILE_EVENTS)[number];

export interface FileEvent {
  readonly event: FileEventName;
  /** Below what is watched; empty: that itself. */
  readonly path: Buffer;
  readonly directory: boolean;
  readonly cookie?: number;
}

export interface WatchOptions {
  /** All folders below too, but for other file systems; new ones as they come, with what is in them by then told as made, some of it perhaps twice. */
  readonly recursive?: boolean;
  readonly signal?: AbortSignal;
}

/** Read once; ending the iteration closes it. While nobody reads, events wait in the sandbox, up to the kernel's limit. */
export interface FileWatch extends AsyncIterable<FileEvent> {
  close(): void;
}
