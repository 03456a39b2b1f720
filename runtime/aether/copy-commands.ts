/**
 * The commands that run in a sandbox, with their output so far, for another one that goes on with the same memory (a fork). Those that have ended stay
 * where they are. What a client had asked for by a request id it has not asked of the other one, and nobody waits there for any of them.
 */
import { constants, copyFileSync, existsSync, mkdirSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { CommandJournal, commandFolder } from './command-journal.ts';

/** `to` must not be there. At once, so that it is of one moment. @throws what the file system says */
export function copyRunning(from: string, to: string): void {
  const journal = new CommandJournal(from);
  const copy = new CommandJournal(to);
  try {
    mkdirSync(to, { mode: 0o700 });
    copy.skipTo(journal.lastId);
    for (const record of journal.records()) {
      if (record.result !== undefined || record.lost !== undefined) continue;
      copy.begin({ ...record, requestId: undefined, background: true });
      copyOutput(commandFolder(from, record.id), commandFolder(to, record.id));
    }
  } finally {
    copy.close();
  }
}

/** All of it, for one of several that are made of it. */
export function copyCommands(from: string, to: string): void {
  copyOutput(from, to);
  for (const name of readdirSync(from, { withFileTypes: true })) {
    if (name.isDirectory()) copyOutput(join(from, name.name), join(to, name.name));
  }
}

function copyOutput(from: string, to: string): void {
  if (!existsSync(from)) return;
  mkdirSync(to, { mode: 0o700 });
  for (const entry of readdirSync(from, { withFileTypes: true })) {
    if (entry.isFile())
      copyFileSync(join(from, entry.name), join(to, entry.name), constants.COPYFILE_EXCL | constants.COPYFILE_FICLONE);
  }
}
