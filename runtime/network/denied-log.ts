/**
 * What a sandbox tried and was denied: a line of JSON an attempt, in two files of the sandbox's folder, of which the older one goes when the
 * newer one is full. Attempts that differ in nothing but their time are one line with a count.
 */
import { appendFileSync, readFileSync, renameSync, statSync } from 'node:fs';
import type { ProgramNote } from './program-notes.ts';

export interface DeniedAttempt extends Partial<ProgramNote> {
  /** ISO 8601, of the first one. */
  readonly time: string;
  /** `packet`: the link's end; `name`: the resolver. */
  readonly kind: 'packet' | 'name';
  /** An address, or the name that was asked for. */
  readonly destination: string;
  readonly port?: number;
  /** `tcp`, `udp`, `icmp`, or the number of another one; of a name what was asked for (`A`). */
  readonly protocol: string;
  readonly reason: string;
  readonly source?: string;
  /** A name that had led to the address. */
  readonly name?: string;
  readonly count: number;
}

const FILE_BYTES = 1 << 20;
const MAX_SHOWN = 10_000;

export class DeniedLog {
  private readonly path: string;

  constructor(path: string) {
    this.path = path;
  }

  /** Never fails: on a full disk the count alone remains. */
  append(attempts: readonly DeniedAttempt[]): void {
    const lines = merged(attempts).map((attempt) => `${JSON.stringify(attempt)}\n`);
    try {
      if ((statSync(this.path, { throwIfNoEntry: false })?.size ?? 0) > FILE_BYTES)
        renameSync(this.path, `${this.path}.1`);
      appendFileSync(this.path, lines.join(''), { mode: 0o600 });
    } catch {
      // It is a log.
    }
  }

  /** The latest, oldest first. */
  read(limit = 1000): DeniedAttempt[] {
    const lines = [`${this.path}.1`, this.path].flatMap((path) => linesOf(path));
    return lines.slice(-Math.min(limit, MAX_SHOWN)).flatMap((line) => {
      try {
        return [JSON.parse(line) as DeniedAttempt];
      } catch {
        // Written on a full disk, or when this machine stopped.
        return [];
      }
    });
  }
}

function linesOf(path: string): string[] {
  try {
    return readFileSync(path, 'utf8').split('\n').filter(Boolean);
  } catch {
    return [];
  }
}

function merged(attempts: readonly DeniedAttempt[]): DeniedAttempt[] {
  const found = new Map<string, DeniedAttempt>();
  for (const attempt of attempts) {
    const { kind, destination, port, protocol, reason, pid } = attempt;
    const key = [kind, destination, port, protocol, reason, pid].join(' ');
    const before = found.get(key);
    found.set(key, before === undefined ? attempt : { ...before, count: before.count + attempt.count });
  }
  return [...found.values()];
}
