/**
 * Takes a snapshot of a machine under QEMU: it stands still, its devices' state comes over a socket, its memory is compared with the snapshot before. Made
 * under another name, and there when it is whole. Whatever fails (a full disk, above all), the machine goes on as before.
 */
import { existsSync } from 'node:fs';
import { mkdir, rename, rm, stat } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Transform } from 'node:stream';
import { setTimeout as delay } from 'node:timers/promises';
import { failPoint, messageOf } from '#base';
import { replaceFile, syncFolder } from '#linux';
import { fail } from '../../errors.ts';
import { machineSockets } from '../qemu/arguments.ts';
import { isObject } from '../qemu/monitor.ts';
import type { QemuVm } from '../qemu/qemu-vm.ts';
import type { SnapshotFacts } from '../vm-driver.ts';
import { writeMemoryLayer } from './memory-layer.ts';
import { PageFile } from './page-file.ts';
import { RamStream } from './ram-stream.ts';
import {
  layersFrom,
  MEMORY,
  MOST_LAYERS,
  openMemory,
  RECORD,
  readSnapshot,
  type SnapshotRecord,
  STATE,
} from './snapshot-folder.ts';
import { receiveState } from './state-transfer.ts';

const CANCEL_MS = 30_000;
/** Memory that came in the stream, until it is a layer. */
const PAGES = 'pages';

export async function takeSnapshot(
  vm: QemuVm,
  folder: string,
  { base, signal }: { readonly base?: string; readonly signal?: AbortSignal },
): Promise<SnapshotFacts> {
  const refuse = (reason: string, cause?: unknown) => fail('VM_SNAPSHOT', { id: vm.spec.id, folder, reason }, cause);
  if (existsSync(folder)) throw refuse('it is there already');
  const running = (await vm.state()) === 'running';
  const part = `${folder}.part`;
  try {
    await rm(part, { recursive: true, force: true });
    await mkdir(part, { recursive: true, mode: 0o700 });
    if (running) await vm.stop();
    const { memoryFile, memoryBytes } = vm.spec;
    const pages = vm.privateMemory ? new PageFile(join(part, PAGES), memoryBytes) : undefined;
    const through = pages === undefined ? undefined : new RamStream(pages, memoryBytes);
    const stateBytes = await saveState(vm, join(part, STATE), through, signal).finally(() => pages?.close());
    failPoint('vm-state-saved');
    const memory = pages === undefined ? memoryFile : join(part, PAGES);
    const facts = await saveMemory(vm, memory, folder, part, stateBytes, base, signal);
    await rm(join(part, PAGES), { force: true });
    failPoint('vm-memory-saved');
    await rename(part, folder);
    await syncFolder(dirname(folder));
    return facts;
  } catch (error) {
    await rm(part, { recursive: true, force: true }).catch(() => {});
    // Of one that has ended there is nothing to go on.
    if (running) await vm.cont().catch(() => {});
    throw refuse(messageOf(error), error);
  }
}

async function saveState(vm: QemuVm, path: string, through?: Transform, signal?: AbortSignal): Promise<number> {
  const socket = machineSockets(vm.folder).migration;
  const receiver = await receiveState(socket, path, through);
  try {
    signal?.throwIfAborted();
    await vm.ask('migrate', { uri: `unix:${socket}` });
    const failed = receiver.done.then(
      () => new Promise<never>(() => {}),
      (error: unknown) => Promise.reject(error),
    );
    await Promise.race([
      migrated(vm, signal),
      failed,
      vm.ended.then(({ detail }) => Promise.reject(new Error(detail))),
    ]);
    return await receiver.done;
  } catch (error) {
    await receiver.close();
    await cancelled(vm);
    throw error;
  } finally {
    await rm(socket, { force: true });
  }
}

async function migrated(vm: QemuVm, signal?: AbortSignal): Promise<void> {
  for (let pause = 2; ; pause = Math.min(50, pause * 2)) {
    signal?.throwIfAborted();
    const status = await vm.ask('query-migrate');
    const name = isObject(status) ? status.status : undefined;
    if (name === 'completed') return;
    if (name === 'failed' || name === 'cancelled') {
      throw new Error(
        isObject(status) && typeof status['error-desc'] === 'string' ? status['error-desc'] : `it has ${name}`,
      );
    }
    await delay(pause);
  }
}

/** Nothing of it is under way then; a machine that has ended has nothing under way either. */
async function cancelled(vm: QemuVm): Promise<void> {
  await vm.ask('migrate_cancel').catch(() => {});
  const until = performance.now() + CANCEL_MS;
  for (;;) {
    const status = await vm.ask('query-migrate').catch(() => ({ status: 'none' }));
    const name = isObject(status) ? (status.status ?? 'none') : 'none';
    if (['none', 'completed', 'failed', 'cancelled'].includes(String(name)) || performance.now() > until) return;
    await delay(5);
  }
}

async function saveMemory(
  vm: QemuVm,
  memoryFile: string,
  folder: string,
  part: string,
  stateBytes: number,
  basePath: string | undefined,
  signal?: AbortSignal,
): Promise<SnapshotFacts> {
  const older = basePath === undefined ? undefined : await readSnapshot(basePath);
  const base = older !== undefined && older.layerPaths.length < MOST_LAYERS ? older : undefined;
  const below = base === undefined ? undefined : await openMemory(base);
  try {
    const { memoryBytes, id } = vm.spec;
    const layer = await writeMemoryLayer(join(part, MEMORY), memoryFile, memoryBytes, below, signal);
    const record: SnapshotRecord = {
      version: 1,
      machine: id,
      memoryBytes,
      layers: layersFrom(folder, base),
      stateBytes,
    };
    await replaceFile(join(part, RECORD), JSON.stringify(record));
    await syncFolder(part);
    const { size } = await stat(join(part, MEMORY));
    return { stateBytes, memoryLayerBytes: size, changedPages: layer.changedPages, zeroPages: layer.zeroPages };
  } finally {
    await below?.close();
  }
}
