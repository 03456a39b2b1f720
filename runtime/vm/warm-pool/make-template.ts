/**
 * Makes a template: a machine is booted without drives or network until its guest waits for its order, loads what any sandbox may need, and stands still
 * for a snapshot. One at a time on a node; what a process that was killed has left of it goes before the next one, and its machine when a service begins.
 */
import { randomBytes } from 'node:crypto';
import { existsSync, mkdirSync, mkdtempSync, readdirSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { failPoint } from '#base';
import { syncFolder, tryLock, withLock } from '#linux';
import { fail } from '../../errors.ts';
import type { RuntimeFolders } from '../../sandbox/state-folders.ts';
import type { ServiceClass } from '../../sandbox-api/sandbox.ts';
import { GuestLink } from '../guest/guest-link.ts';
import { guestWork } from '../guest/guest-order.ts';
import { endProcess } from '../qemu/machine-process.ts';
import type { RunningVm, VmSpec } from '../vm-driver.ts';
import type { SandboxVmDriver } from '../vm-drivers.ts';
import { vmPlaces } from '../vm-places.ts';
import {
  listTemplates,
  readTemplate,
  removeTemplate,
  snapshotDigests,
  TEMPLATE,
  type Template,
  type TemplateRecord,
  templatesFolder,
} from './template-folder.ts';
import { bareSpec, type TemplateShape } from './template-shape.ts';

/** On a disk; those that were used longest ago go. */
export const MOST_TEMPLATES = 8;
const BOOT_MS = 300_000;
/** Somebody else makes one. */
const TURN_MS = 600_000;
/** In the run folder. */
const MAKER = 'template';

export interface MakeTemplate {
  readonly stateDir: string;
  readonly runDir: string;
  readonly driver: SandboxVmDriver;
  /** Of a machine of this shape. */
  readonly spec: VmSpec;
  readonly shape: TemplateShape;
  /** For a guest with any parts. */
  readonly modules: readonly string[];
  readonly serviceClass?: ServiceClass;
  readonly signal?: AbortSignal;
}

/** One that is there already is taken. @throws VM_START, VM_SNAPSHOT, VM_TEMPLATE */
export async function makeTemplate(wish: MakeTemplate): Promise<Template> {
  const { stateDir, shape, signal } = wish;
  const folder = templatesFolder(stateDir);
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  const make = async () => {
    const before = readTemplate(stateDir, shape.key);
    if (before !== undefined) return before;
    removeUseless(stateDir, shape.world);
    const work = mkdtempSync(join(folder, NEW));
    try {
      const snapshot = `s-${randomBytes(8).toString('hex')}`;
      await bootInto(join(work, snapshot), wish);
      const { digests, bytes } = await snapshotDigests(join(work, snapshot));
      const { boot } = wish.spec;
      const kernel = basename('kernel' in boot ? boot.kernel : '').replace(/^vmlinuz-|\.elf$/g, '');
      const made = new Date().toISOString();
      const record: TemplateRecord = { version: 1, ...shape, made, kernel, bytes, snapshot, digests };
      writeFileSync(join(work, TEMPLATE), JSON.stringify(record), { mode: 0o600 });
      removeTemplate(stateDir, shape.key);
      renameSync(work, join(folder, shape.key));
      await syncFolder(folder);
    } finally {
      rmSync(work, { recursive: true, force: true });
    }
    return readTemplate(stateDir, shape.key)!;
  };
  return withLock(lockOf(stateDir), make, { timeoutMs: TURN_MS, signal });
}

/** Ends the machine of one that was killed while it made a template; whoever makes one now has the lock. */
export async function endDeadMaker({ stateDir, runDir }: Pick<RuntimeFolders, 'stateDir' | 'runDir'>): Promise<void> {
  const { folder } = vmPlaces(runDir, MAKER);
  if (!existsSync(folder)) return;
  const held = tryLock(lockOf(stateDir));
  if (held === undefined) return;
  try {
    // QEMU's, whichever driver runs sandboxes now: no other one has templates.
    await endProcess(folder);
    rmSync(folder, { recursive: true, force: true });
  } finally {
    held.release();
  }
}

const lockOf = (stateDir: string) => join(templatesFolder(stateDir), 'lock');
const NEW = '.new-';

/** The lock is ours: who had begun one is gone. */
function removeUseless(stateDir: string, world: string): void {
  const folder = templatesFolder(stateDir);
  for (const name of readdirSync(folder)) {
    if (name.startsWith(NEW)) rmSync(join(folder, name), { recursive: true, force: true });
  }
  const useful = listTemplates(stateDir).filter((one) => one.world === world);
  for (const one of listTemplates(stateDir)) {
    const place = useful.findIndex(({ key }) => key === one.key);
    if (place < 0 || place >= MOST_TEMPLATES - 1) removeTemplate(stateDir, one.key);
  }
}

async function bootInto(snapshot: string, wish: MakeTemplate): Promise<void> {
  const { driver, runDir, spec, modules, serviceClass, signal } = wish;
  const { folder, memoryFile } = vmPlaces(runDir, MAKER);
  await driver.sweep(folder);
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  let vm: RunningVm | undefined;
  try {
    vm = await driver.start({ ...bareSpec(spec, { id: MAKER, folder, memoryFile }), serviceClass });
    failPoint('template-booting');
    await settle(vm, modules, signal);
    await vm.snapshot(snapshot, signal === undefined ? {} : { signal });
  } finally {
    await vm?.kill();
    rmSync(folder, { recursive: true, force: true });
  }
}

/** Resolves when it waits for its order with all that a sandbox may need. */
async function settle(vm: RunningVm, modules: readonly string[], signal?: AbortSignal): Promise<void> {
  const refuse = (reason: string) => fail('VM_TEMPLATE', { reason });
  const link = new GuestLink(vm.agentSocket!, {
    started() {},
    failed() {},
    ended() {},
    frame() {},
    broken() {},
  });
  const gone = vm.ended.then(({ detail }) => {
    throw refuse(`its machine has ended: ${detail}`);
  });
  const left = new Promise<never>((_resolve, reject) => {
    signal?.addEventListener('abort', () => reject(refuse('it was given up')), { once: true });
  });
  try {
    signal?.throwIfAborted();
    const ready = link.work(guestWork.modules(modules), BOOT_MS).then(() => link.settled());
    await Promise.race([ready, gone, left]);
  } finally {
    link.close();
    gone.catch(() => {});
  }
}
