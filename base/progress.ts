/** How long work tells how far it is. Producers call it freely; whoever draws throttles. */

export interface ProgressEvent {
  /** What moves, stable over its life: "layer 3/7 sha256:1234abcd", "push", "verify". */
  readonly task: string;
  /** What is done with it now: "fetch", "write", "done". */
  readonly phase: string;
  readonly doneBytes?: number;
  readonly totalBytes?: number;
  readonly note?: string;
}

export type Progress = (event: ProgressEvent) => void;

export const silent: Progress = () => {};
