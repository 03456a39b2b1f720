/**
 * The commands that run in a sandbox, with their output so far, for another one that goes on with the same memory (a fork). Those that have ended stay
 * where they are. What a client had asked for by a request id it has not asked of the other one, and nobody waits there for any of them.
 */
import { constants, existsSync } from 'node:fs';
import { copyFile, mkdir, readdir } from 'node:fs/promises';
import { join } from 'node:path';
import { CommandJournal, commandFolder } from './command-journal.ts';

/** `to` must not be there. So that it is of one moment, nothing of the sandbox may be heard meanwhile. @throws what the file system says */
export async function copyRunning(from: string, to: string): Promise<void> {
  const journal = new CommandJournal(from);
  const copy = new CommandJournal(to);
  try {
    await mkdir(to, { mode: 0o700 });
    copy.skipTo(journal.lastId);
    for (const record of journal.records()) {
      if (record.result !== undefined || record.lost !== undefined) continue;
      copy.begin({ ...record, requestId: undefined, background: true });
      await copyOutput(commandFolder(from, record.id), commandFolder(to, record.id));
    }
  } finally {
    copy.close();
  }
}

/** All of it, for one of several that are made of it. */
export async function copyCommands(from: string, to: string): Promise<void> {
  await copyOutput(from, to);
  for (const name of await readdir(from, { withFileTypes: true })) {
    if (name.isDirectory()) await copyOutput(join(from, name.name), join(to, name.name));
  }
}

const HOW = constants.COPYFILE_EXCL | constants.COPYFILE_FICLONE;

/** Output has tens of megabytes: whoever asks the service for something else does not wait for it. */
async function copyOutput(from: string, to: string): Promise<void> {
  if (!existsSync(from)) return;
  await mkdir(to, { mode: 0o700 });
  for (const entry of await readdir(from, { withFileTypes: true })) {
    if (entry.isFile()) await copyFile(join(from, entry.name), join(to, entry.name), HOW);
  }
}
