/**
 * A node of its own for one trace: mounts, caches and a data server that nothing else uses, so that whatever a start reads
 * is read from that server, and nothing is in a page cache already.
 *
 *     <run>/traces/<id>.lock     held (flock) for as long as the trace is recorded
 *     <run>/traces/<id>/         mount table, data server
 *     <cache>/traces/<id>/       metadata, chunks
 *     <state>/traces/<id>/       the sandbox
 *
 * A process that is killed leaves its node under a free lock: `reclaimTraces` ends and removes it.
 */
import { randomBytes } from 'node:crypto';
import { readdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { messageOf } from '#base';
import { listMounts, reclaimDataServers, stopDataServers, unmount } from '#imagesvc';
import { type FileLock, tryLock } from '#linux';
import { reclaimSandboxes } from '../sandbox/sandboxes.ts';
import { type RuntimeFolders, runtimeFolders } from '../sandbox/state-folders.ts';

const TRACES = 'traces';
const ID = /^[0-9a-f]{12}$/;

export class TraceNode {
  readonly folders: RuntimeFolders;
  readonly #lock: FileLock;

  private constructor(folders: RuntimeFolders, lock: FileLock) {
    this.folders = folders;
    this.#lock = lock;
  }

  static make(node: RuntimeFolders): TraceNode {
    for (;;) {
      const id = randomBytes(6).toString('hex');
      const lock = tryLock(lockOf(node, id));
      if (lock !== undefined) return new TraceNode(foldersOf(node, id), lock);
    }
  }

  /** Undefined while somebody records there. */
  static take(node: RuntimeFolders, id: string): TraceNode | undefined {
    const lock = tryLock(lockOf(node, id));
    return lock === undefined ? undefined : new TraceNode(foldersOf(node, id), lock);
  }

  /** Ends all that runs there, and removes it. What cannot be removed now is found by the next command. */
  async remove(): Promise<void> {
    try {
      const { folders } = this;
      const { problems } = await reclaimSandboxes(folders);
      if (problems.length > 0) throw new Error(problems.join('; '));
      for (const { id } of await listMounts(folders)) await unmount(id, { ...folders, lazy: true });
      // A server that has lost its supervisor gets one, and then ends like any other.
      await reclaimDataServers(folders);
      await stopDataServers({ ...folders, force: true });
      for (const folder of Object.values(folders)) rmSync(folder, { recursive: true, force: true });
      rmSync(this.#lock.path, { force: true });
    } finally {
      this.#lock.release();
    }
  }
}

function lockOf({ runDir }: RuntimeFolders, id: string): string {
  return join(runDir, TRACES, `${id}.lock`);
}

function foldersOf({ runDir, cacheDir, stateDir }: RuntimeFolders, id: string): RuntimeFolders {
  return {
    runDir: join(runDir, TRACES, id),
    cacheDir: join(cacheDir, TRACES, id),
    stateDir: join(stateDir, TRACES, id),
  };
}

/** Ends and removes what killed traces have left. Answers what could not be put right. */
export async function reclaimTraces(given: Partial<RuntimeFolders> = {}): Promise<string[]> {
  const node = runtimeFolders(given);
  const problems: string[] = [];
  if (process.geteuid?.() !== 0) return problems;
  const ids = new Set(
    Object.values(node).flatMap((folder) => namesIn(join(folder, TRACES)).map((name) => name.replace(/\.lock$/, ''))),
  );
  for (const id of ids) {
    if (!ID.test(id)) continue;
    try {
      await TraceNode.take(node, id)?.remove();
    } catch (error) {
      problems.push(`trace ${id}: ${messageOf(error)}`);
    }
  }
  return problems;
}

function namesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}
