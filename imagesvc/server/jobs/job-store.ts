/**
 * Jobs on disk: `<folder>/jobs/<id>.json`, each replaced by renaming a synced file over it, root's (or the service's user's)
 * alone, since a waiting job may hold credentials of a registry. One service owns the folder.
 */
import { mkdirSync } from 'node:fs';
import { chmod, readdir, readFile, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { type FileLock, replaceFile, syncFolder, tryLock } from '#linux';
import { fail } from '../../errors.ts';
import { JOB_STATES, type Job } from './job.ts';

const NAME = /^[0-9a-f]{24}\.json$/;

export class JobStore {
  readonly #folder: string;
  readonly #lock: FileLock;
  /** Writes of one job happen in the order they were asked for. */
  readonly #writes = new Map<string, Promise<void>>();

  private constructor(folder: string, held: FileLock) {
    this.#folder = folder;
    this.#lock = held;
  }

  /** @throws SERVER_STATE_BUSY */
  static open(stateDir: string): JobStore {
    const folder = join(stateDir, 'jobs');
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    const held = tryLock(join(stateDir, 'lock'));
    if (held === undefined) throw fail('SERVER_STATE_BUSY', { folder: stateDir });
    return new JobStore(folder, held);
  }

  /** All jobs, oldest first. Files that a crash left unfinished are removed; one that is no job is left out. */
  async readAll(): Promise<Job[]> {
    await chmod(this.#folder, 0o700);
    const jobs: Job[] = [];
    for (const name of await readdir(this.#folder)) {
      const path = join(this.#folder, name);
      if (name.startsWith('.')) await rm(path, { force: true });
      if (!NAME.test(name)) continue;
      const job = parseJob(name.slice(0, 24), await readFile(path, 'utf8'));
      if (job !== undefined) jobs.push(job);
    }
    return jobs.sort((a, b) => (a.queuedAt < b.queuedAt ? -1 : a.queuedAt > b.queuedAt ? 1 : a.id < b.id ? -1 : 1));
  }

  /** On disk when this resolves: the job as it is now. */
  write(job: Job): Promise<void> {
    const text = `${JSON.stringify(job)}\n`;
    return this.#afterEarlier(job.id, () => this.#replace(job.id, text));
  }

  remove(id: string): Promise<void> {
    return this.#afterEarlier(id, () => rm(join(this.#folder, `${id}.json`), { force: true }));
  }

  /** Waits for all writes, and gives the folder free. */
  async close(): Promise<void> {
    await Promise.allSettled(this.#writes.values());
    this.#lock.release();
  }

  #afterEarlier(id: string, work: () => Promise<void>): Promise<void> {
    const write = (this.#writes.get(id) ?? Promise.resolve()).catch(() => {}).then(work);
    this.#writes.set(id, write);
    const forget = () => {
      if (this.#writes.get(id) === write) this.#writes.delete(id);
    };
    write.then(forget, forget);
    return write;
  }

  async #replace(id: string, text: string): Promise<void> {
    const fresh = join(this.#folder, `.${id}.tmp`);
    await replaceFile(join(this.#folder, `${id}.json`), text, { fresh });
    await syncFolder(this.#folder);
  }
}

function parseJob(id: string, text: string): Job | undefined {
  try {
    const value = JSON.parse(text) as Partial<Job>;
    const whole =
      value.version === 1 &&
      value.id === id &&
      typeof value.caller === 'string' &&
      typeof value.createdAt === 'string' &&
      typeof value.queuedAt === 'string' &&
      typeof value.attempt === 'number' &&
      typeof value.crashes === 'number' &&
      (JOB_STATES as readonly unknown[]).includes(value.state) &&
      (value.work?.kind === 'convert' || value.work?.kind === 'pack-diff') &&
      typeof value.work.request === 'object' &&
      value.work.request !== null;
    return whole ? (value as Job) : undefined;
  } catch {
    return undefined;
  }
}
