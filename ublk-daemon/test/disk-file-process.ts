/**
 * A process that serves a disk as a file and a loop device, until SIGTERM: for tests that use it, and kill it. Arguments: the disk's folder
 * and the file, and `hold`: then it takes over from one that was killed. It writes where it is, then an answer to each line of stdin: `snapshot NAME`, `compact`.
 */
import { createInterface } from 'node:readline';
import { openDisk } from '../disk-folder.ts';
import { resumeFile, serveFile } from '../target/file/file-server.ts';

const [folder, path, held] = process.argv.slice(2);
const hold = held === 'hold';
const opened = await openDisk(folder!);
const options = { target: opened.disk, path: path!, loop: true, hold };
const server = (hold ? await resumeFile(options) : undefined) ?? (await serveFile(options));
process.once('SIGUSR2', async () => {
  await server.leave!();
  await opened.disk.close();
  process.exit(0);
});
process.once('SIGTERM', async () => {
  await server.stop();
  await opened.disk.close();
  process.exit(0);
});
say({ path: server.path, loop: server.loop });
for await (const line of createInterface({ input: process.stdin })) {
  const [command, name] = line.split(' ');
  try {
    if (command === 'snapshot') say({ lowers: (await opened.snapshot(name)).lowers });
    else say(await opened.disk.compact());
  } catch (error) {
    say({ error: String(error) });
  }
}

function say(answer: unknown): void {
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
