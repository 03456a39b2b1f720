/**
 * The process that disk-crash.test.ts kills: writes, discards, flushes, snapshots and compacts a disk without end, and tells on stdout what
 * it began (`b N`) and which flush was answered (`f N`: everything up to operation N is safe).
 */
import { writeSync } from 'node:fs';
import { openDisk } from '../disk-folder.ts';
import { plannedOperation } from './disk-crash-plan.ts';
import { DiskModel, SECTOR } from './disk-model.ts';

const [folder, seed, sectors, first] = process.argv.slice(2);
const { disk, snapshot } = await openDisk(folder!);
const model = new DiskModel(Number(sectors));
for (let operation = Number(first); ; operation++) {
  const { what, start, length } = plannedOperation(Number(seed), operation, Number(sectors));
  writeSync(1, `b ${operation}\n`);
  if (what === 'write') await disk.write(start * SECTOR, model.write(start, length, operation));
  else if (what === 'discard') await disk.discard(start * SECTOR, length * SECTOR);
  else if (what === 'flush') await disk.flush();
  else if (what === 'snapshot') await snapshot();
  else await disk.compact();
  if (what !== 'write' && what !== 'discard') writeSync(1, `f ${operation}\n`);
}
