/** What is on disk of a command: `<sandbox>/commands/<id>/record.json`, beside its output. Written before it starts and when it has ended. */
import { mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { ExecResult } from '../sandbox-api/exec.ts';

export interface CommandRecord {
  readonly version: 1;
  readonly id: number;
  /** For people: as UTF-8 as it goes. */
  readonly args: readonly string[];
  readonly requestId?: string;
  readonly terminal: boolean;
  /** A shell session: it takes part of the protocol of its own. */
  readonly session: boolean;
  /** It runs for nobody: while only such commands run, the sandbox is idle. */
  readonly background?: boolean;
  /** Milliseconds since 1970. */
  readonly startedMs: number;
  /** The same, if the sandbox had never stood still: what it stood (`stoodMs`) comes on top. */
  readonly deadlineMs?: number;
  readonly result?: ExecResult;
  /** Why there is no result, and never will be. */
  readonly lost?: string;
}

export function commandFolder(commands: string, id: number): string {
  return join(commands, String(id));
}

export function writeCommandRecord(commands: string, record: CommandRecord): void {
  const folder = commandFolder(commands, record.id);
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  const path = join(folder, 'record.json');
  writeFileSync(`${path}.tmp`, JSON.stringify(record), { mode: 0o600 });
  renameSync(`${path}.tmp`, path);
}

/** By id. What is damaged is left out: it was being written when the machine went down. */
export function readCommandRecords(commands: string): CommandRecord[] {
  const records: CommandRecord[] = [];
  for (const name of numbersIn(commands)) {
    try {
      const record = JSON.parse(readFileSync(join(commands, String(name), 'record.json'), 'utf8')) as CommandRecord;
      if (record.version === 1 && record.id === name) records.push(record);
    } catch {
      // See above.
    }
  }
  return records;
}

/** Also of folders without a record: no id is used twice. */
export function lastCommandId(commands: string): number {
  return numbersIn(commands).at(-1) ?? 0;
}

export function forgetCommand(commands: string, id: number): void {
  rmSync(commandFolder(commands, id), { recursive: true, force: true });
}

function numbersIn(commands: string): number[] {
  try {
    return readdirSync(commands)
      .filter((name) => /^[1-9]\d*$/.test(name))
      .map(Number)
      .sort((a, b) => a - b);
  } catch {
    return [];
  }
}
