/** What a sandbox is, as its record on disk tells: enough to end it after a crash, and to pack it later. */
import { randomBytes } from 'node:crypto';
import { closeSync, fsyncSync, openSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { dirname } from 'node:path';
import { type Digest, isDigest, messageOf, systemCode } from '#base';
import type { Image } from '#imagesvc';
import type { ProcessIdentity } from '#linux';
import type { UsernsMode } from '../backend/user-namespace.ts';
import type { DiskFacts } from '../disk/sandbox-disk.ts';
import { fail } from '../errors.ts';
import type { NetworkFacts } from '../network/network-facts.ts';
import type { AllLimits } from '../sandbox-api/limits.ts';
import type { IdleAction, SandboxEnd, ServiceClass } from '../sandbox-api/sandbox.ts';
import type { MachineFacts } from '../vm/full/machine-facts.ts';
import type { VmFacts } from '../vm/machine-facts.ts';

export interface ImageReference {
  readonly name: string;
  /** Of the manifest: the name may come to mean another image. */
  readonly digest: Digest;
}

export interface SandboxRecord {
  readonly version: 1;
  readonly name: string;
  /** What the backend knows it by: another one for each run. */
  readonly id: string;
  /** `running`: it is, or the process that ran it was killed. `kept`: it has ended and its upper stays. */
  readonly state: 'running' | 'kept';
  readonly keep: boolean;
  readonly createdAt: string;
  readonly backend: string;
  /** URL of the store that has the images. */
  readonly store: string;
  readonly base: ImageReference;
  readonly workspace?: ImageReference;
  readonly toolkits: readonly ImageReference[];
  readonly owner: ProcessIdentity;
  readonly limits?: AllLimits;
  /** What holds the limit on its disk. */
  readonly disk?: DiskFacts;
  /** As it was asked for. */
  readonly userns?: UsernsMode;
  /** Of one that is a virtual machine. */
  readonly vm?: VmFacts;
  /** Nothing: loopback alone. */
  readonly network?: NetworkFacts;
  /** What its root is outside, while it has a user namespace: its range of ids (backend/id-ranges.ts). */
  readonly idBase?: number;
  /** Of a full machine. */
  readonly machine?: MachineFacts;
  /** Paths in the root that only mounts needed: taken out again if they are still empty. */
  readonly mountPoints: readonly string[];
  /** Of a kept one, where it is known. */
  readonly exitCode?: number;
  /** One that stays without a command: made by `dsec sandbox create`, held by the keeper. */
  readonly resident?: ResidentFacts;
  /** Why a resident one has ended. */
  readonly end?: SandboxEnd;
  /** Of a container for tasks: whose it is. The pool makes and ends it. */
  readonly pool?: string;
}

/** As JSON; small: it is in the record. */
export type SandboxTag = Readonly<Record<string, unknown>>;

export interface ResidentFacts {
  /** Of the creation: asked again with it, the same sandbox is the answer. */
  readonly requestId?: string;
  /** What whoever made it wants to know again, such as whose it is. */
  readonly tag?: SandboxTag;
  readonly defaults: { readonly env: readonly string[]; readonly user: string; readonly cwd: string };
  /** ISO 8601. */
  readonly expiresAt?: string;
  /** It was asked to end. */
  readonly stopAsked?: boolean;
  /** By nobody's wish: it was idle for `idleMs`. */
  readonly idledOut?: boolean;
  /** What becomes of it when nobody has used it for so long. */
  readonly idleMs?: number;
  readonly idleAction?: IdleAction;
  /** Nobody wants what it changed. */
  readonly removeAtEnd?: boolean;
  readonly class?: ServiceClass;
  /** ISO 8601: it is paused, or is to be. */
  readonly pausedAt?: string;
  /** How long it has stood still in its life, up to the last time that it was resumed. */
  readonly stoodMs?: number;
}

export function imageReference(image: Image): ImageReference {
  return { name: image.name, digest: image.manifestDigest };
}

const NAME = /^[a-z0-9][a-z0-9_.-]{0,62}$/;

/** @throws RUNTIME_SANDBOX_NAME */
export function checkSandboxName(name: string): string {
  if (!NAME.test(name)) throw fail('RUNTIME_SANDBOX_NAME', { name, problem: 'it cannot be a folder and a host name' });
  return name;
}

export function randomSandboxName(): string {
  return `sandbox-${randomBytes(4).toString('hex')}`;
}

/**
 * `durable`: on disk before this returns, for a sandbox that somebody wants to keep.
 * @throws RUNTIME_RECORD_WRITE; then the record is as it was
 */
export function writeRecord(path: string, record: SandboxRecord, durable: boolean): void {
  const fresh = `${path}.tmp`;
  try {
    const fd = openSync(fresh, 'w', 0o600);
    try {
      writeFileSync(fd, `${JSON.stringify(record, null, 1)}\n`);
      if (durable) fsyncSync(fd);
    } finally {
      closeSync(fd);
    }
    renameSync(fresh, path);
  } catch (error) {
    rmSync(fresh, { recursive: true, force: true });
    // <state>/sandboxes/<name>/record.json
    const folder = dirname(dirname(dirname(path)));
    throw fail('RUNTIME_RECORD_WRITE', { path, folder, reason: messageOf(error) }, error);
  }
}

/** Waits outside this thread until what `writeRecord` wrote is on disk. Without the disk's help it is as it was written. */
export async function settleRecord(path: string): Promise<void> {
  const file = await open(path, 'r').catch(() => undefined);
  await file?.datasync().catch(() => {});
  await file?.close();
}

/** Undefined when there is none. @throws RUNTIME_SANDBOX_RECORD */
export function readRecord(path: string): SandboxRecord | undefined {
  let text: string;
  try {
    text = readFileSync(path, 'utf8');
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return undefined;
    throw error;
  }
  // The machine went down before it was on disk, and took with it all that it told of.
  if (/^[\0\s]*$/.test(text)) return undefined;
  let value: Partial<SandboxRecord> | null;
  try {
    value = JSON.parse(text) as Partial<SandboxRecord> | null;
  } catch (error) {
    throw fail('RUNTIME_SANDBOX_RECORD', { path, problem: messageOf(error) }, error);
  }
  const whole =
    value?.version === 1 &&
    typeof value.name === 'string' &&
    NAME.test(value.name) &&
    typeof value.id === 'string' &&
    /^[a-z0-9._-]+$/.test(value.id) &&
    (value.state === 'running' || value.state === 'kept') &&
    typeof value.keep === 'boolean' &&
    isDigest(value.base?.digest) &&
    Array.isArray(value.toolkits) &&
    Array.isArray(value.mountPoints);
  if (!whole) throw fail('RUNTIME_SANDBOX_RECORD', { path, problem: 'a field is missing or of the wrong kind' });
  return value as SandboxRecord;
}
