/**
 * What becomes of a sandbox that nobody uses. It is used while a request of a client is being worked on (a command that was not started in the
 * background, a command of a shell session, output that is followed, a connection to a port) and whenever one comes. When that was is
 * kept as the time of a folder, so that another process goes on counting.
 */
import { statSync, utimesSync } from 'node:fs';

export interface IdleHost {
  readonly idleMs: number;
  /** A folder of the sandbox's. */
  readonly marker: string;
  isInUse(): boolean;
  /** It stands still, or has ended: then nothing is counted. */
  isOff(): boolean;
  act(): Promise<unknown>;
}

/** setTimeout takes no more than 24 days. */
const MAX_TIMER_MS = 2 ** 31 - 1;

export class IdleWatch {
  private readonly host: IdleHost;
  private usedMs: number;
  private markedMs = 0;
  private timer: NodeJS.Timeout | undefined;

  constructor(host: IdleHost) {
    this.host = host;
    this.usedMs = timeOf(host.marker);
    this.arm();
  }

  used(): void {
    this.usedMs = Date.now();
    if (this.usedMs - this.markedMs < Math.min(1000, this.host.idleMs / 4)) return;
    this.markedMs = this.usedMs;
    try {
      utimesSync(this.host.marker, this.usedMs / 1000, this.usedMs / 1000);
    } catch {
      // A process that comes later ends it a little earlier.
    }
  }

  stop(): void {
    clearTimeout(this.timer);
  }

  private arm(): void {
    clearTimeout(this.timer);
    const leftMs = this.usedMs + this.host.idleMs - Date.now();
    this.timer = setTimeout(() => this.look(), Math.min(Math.max(1, leftMs), MAX_TIMER_MS)).unref();
  }

  private look(): void {
    if (this.host.isOff() || this.host.isInUse()) this.used();
    if (Date.now() - this.usedMs < this.host.idleMs) {
      this.arm();
      return;
    }
    this.host
      .act()
      .catch(() => {})
      .finally(() => {
        // It could not be done, or it was paused: another time.
        if (!this.host.isOff()) this.used();
        this.arm();
      });
  }
}

function timeOf(path: string): number {
  try {
    // Not of a clock that was wrong.
    return Math.min(statSync(path).mtimeMs, Date.now());
  } catch {
    return Date.now();
  }
}
