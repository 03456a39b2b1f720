/**
 * /dev/ublk-control: one command at a time, through a ring of its own. The kernel carries commands out in a thread of its own, so that
 * this one goes on meanwhile: starting a device waits for reads that this process has to answer.
 *
 * No command is waited for without end. One that takes too long is called off, which ends what waits for a server or for whoever has the device
 * open. What waits for requests that nobody answers cannot be called off: it stays with the kernel, on a ring that is given up, and the
 * next command gets another one. So whoever is told of it can ask again, for that device or another.
 *
 * Devices of users that are not root: a command about one carries the path of its /dev/ublkcN in front of what it has to say, and the
 * kernel asks whether the caller may write to that file. One about a privileged device must not, but for GET_DEV_INFO2.
 */
import { closeSync, openSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { messageOf, systemCode } from '#base';
import { errnoName, IoUring, type Mapping, mapPages, RING_FLAG, RING_OPERATION } from '#linux';
import { fail } from '../../errors.ts';
import { FEATURE, featureNames } from './features.ts';
import {
  CONTROL,
  DEV_INFO_BYTES,
  type DeviceInfo,
  decodeDevInfo,
  encodeDevInfo,
  encodeParams,
  type NewDevice,
  PARAMS_BYTES,
} from './protocol.ts';

const DEVICE = '/dev/ublk-control';
const SLOWEST_LOOK_MS = 20;
/** How long a deleted device that somebody has open is waited for. */
const GONE_MS = 1000;
/** What a command may take, unless it is told otherwise: each takes milliseconds. */
const COMMAND_MS = 60_000;
/** How long one that was called off may take to end. */
const CALLED_OFF_MS = 1000;

/** User data of submissions. */
const COMMAND = 1;
const CANCEL = 2;

/** A command that the kernel refused. `code` names the errno. */
export interface Refusal extends Error {
  readonly code: string;
}

export class UblkControl {
  readonly #fd: number;
  readonly #limitMs: number;
  #current: Way | undefined;
  /** With a command that the kernel has not ended. */
  readonly #givenUp = new Set<Way>();
  /** Devices that have been looked at: whether commands about them carry a path. */
  readonly #unprivileged = new Map<number, boolean>();
  #queue: Promise<unknown> = Promise.resolve();

  /** @param limitMs how long a command is waited for @throws UBLK_UNAVAILABLE */
  constructor({ limitMs = COMMAND_MS }: { readonly limitMs?: number } = {}) {
    this.#limitMs = limitMs;
    try {
      this.#fd = openSync(DEVICE, 'r+');
    } catch (error) {
      const missing = systemCode(error) === 'ENOENT';
      throw fail('UBLK_UNAVAILABLE', { reason: missing ? `no ${DEVICE}` : messageOf(error) }, error);
    }
    try {
      this.#current = openWay();
    } catch (error) {
      closeSync(this.#fd);
      throw fail('UBLK_UNAVAILABLE', { reason: messageOf(error) }, error);
    }
  }

  get #way(): Way {
    this.#current ??= openWay();
    return this.#current;
  }

  get #page(): Mapping {
    return this.#way.page;
  }

  /** A device, not started. The kernel may give less than asked. */
  add(wanted: NewDevice): Promise<DeviceInfo> {
    return this.#run(async () => {
      encodeDevInfo(this.#page.bytes, wanted);
      await this.#command('ADD_DEV', wanted.id, { length: DEV_INFO_BYTES });
      const info = decodeDevInfo(this.#page.bytes);
      this.#unprivileged.set(info.id, isUnprivileged(info));
      return info;
    });
  }

  info(id: number): Promise<DeviceInfo> {
    return this.#run(() => this.#info(id));
  }

  setParams(id: number, disk: Parameters<typeof encodeParams>[1]): Promise<void> {
    return this.#run(async () => {
      const path = await this.#path(id);
      encodeParams(this.#page.bytes.subarray(path.length), disk);
      await this.#command('SET_PARAMS', id, { path, length: PARAMS_BYTES });
    });
  }

  start(id: number): Promise<void> {
    return this.#about('START_DEV', id, process.pid);
  }

  /** Waits for requests that are at work: for `graceMs` more than other commands. */
  stop(id: number, graceMs = 0): Promise<void> {
    return this.#about('STOP_DEV', id, 0, this.#limitMs + graceMs);
  }

  /**
   * Somebody who has the device open keeps its number taken, and waiting for that could take for ever: this goes on after a moment. What is
   * open fails, and the number is free when it is closed.
   */
  async remove(id: number): Promise<void> {
    try {
      await this.#about('DEL_DEV_ASYNC', id);
    } catch (error) {
      // Before 6.9; and users that are not root may not.
      if (!['EOPNOTSUPP', 'EINVAL'].includes(systemCode(error) ?? '')) throw error;
      return this.#about('DEL_DEV', id, 0, GONE_MS).catch((late) => {
        if (systemCode(late) !== 'UBLK_TIMEOUT') throw late;
      });
    }
    for (const until = Date.now() + GONE_MS; Date.now() < until; await delay(5)) {
      try {
        await this.info(id);
      } catch (error) {
        if (systemCode(error) === 'ENODEV') return;
      }
    }
  }

  startRecovery(id: number): Promise<void> {
    return this.#about('START_USER_RECOVERY', id);
  }

  endRecovery(id: number): Promise<void> {
    return this.#about('END_USER_RECOVERY', id, process.pid);
  }

  /** Needs the feature `update size`. */
  updateSize(id: number, sizeBytes: number): Promise<void> {
    return this.#about('UPDATE_SIZE', id, sizeBytes / 512);
  }

  /** What the driver has, bits of FEATURE; undefined where it cannot tell (before 6.5). */
  featureBits(): Promise<bigint | undefined> {
    return this.#run(async () => {
      this.#page.bytes.fill(0);
      try {
        await this.#command('GET_FEATURES', 0, { length: 8 });
      } catch {
        return undefined;
      }
      return this.#page.bytes.readBigUInt64LE(0);
    });
  }

  /** Whether it has one of them. */
  async has(feature: number): Promise<boolean> {
    return (((await this.featureBits()) ?? 0n) & BigInt(feature)) !== 0n;
  }

  /** All of them by name. */
  async features(): Promise<string[] | undefined> {
    const bits = await this.featureBits();
    return bits === undefined ? undefined : featureNames(bits);
  }

  async close(): Promise<void> {
    await this.#queue;
    this.#sweep();
    // The kernel may still write to a page of these: it stays until this process ends.
    for (const { ring } of this.#givenUp) ring.close();
    if (this.#current !== undefined) closeWay(this.#current);
    closeSync(this.#fd);
  }

  /** Lets go of what has ended meanwhile. */
  #sweep(): void {
    for (const way of this.#givenUp) {
      if (resultOf(way) === undefined) continue;
      this.#givenUp.delete(way);
      closeWay(way);
    }
  }

  #run<T>(work: () => Promise<T>): Promise<T> {
    const done = this.#queue.then(work);
    this.#queue = done.catch(() => {});
    return done;
  }

  /** A command that carries nothing but a number. */
  #about(name: keyof typeof CONTROL, id: number, data = 0, limitMs?: number): Promise<void> {
    return this.#run(async () => this.#command(name, id, { path: await this.#path(id), data, limitMs }));
  }

  async #info(id: number): Promise<DeviceInfo> {
    const path = pathOf(id);
    this.#page.bytes.fill(0);
    await this.#command('GET_DEV_INFO2', id, { path, length: DEV_INFO_BYTES });
    const info = decodeDevInfo(this.#page.bytes.subarray(path.length));
    this.#unprivileged.set(id, isUnprivileged(info));
    return info;
  }

  /** What goes in front of a command about this device. */
  async #path(id: number): Promise<Buffer> {
    const unprivileged = this.#unprivileged.get(id) ?? isUnprivileged(await this.#info(id));
    return unprivileged ? pathOf(id) : NO_PATH;
  }

  /** `length` bytes of the page behind the path go along, and come back. */
  async #command(
    name: keyof typeof CONTROL,
    id: number,
    { path = NO_PATH, length = 0, data = 0, limitMs = this.#limitMs }: CommandOptions,
  ): Promise<void> {
    this.#sweep();
    const way = this.#way;
    const { ring, page } = way;
    path.copy(page.bytes);
    way.result = undefined;
    const bytes = path.length + length;
    const at = ring.prepare(RING_OPERATION.URING_CMD, this.#fd, COMMAND);
    const { words } = ring;
    words[at + 2] = CONTROL[name];
    // struct ublksrv_ctrl_cmd: device, queue (none) and length, address, data, length of the path.
    words[at + 12] = id;
    words[at + 13] = (bytes << 16) | 0xffff;
    ring.put64(at + 14, bytes > 0 ? page.address : 0);
    ring.put64(at + 16, data);
    words[at + 18] = path.length;
    ring.submit();
    const result = (await resultWithin(way, limitMs)) ?? (await this.#callOff(way));
    if (result === undefined) throw fail('UBLK_TIMEOUT', { command: name, id, seconds: limitMs / 1000 });
    if (result >= 0) return;
    const code = errnoName(-result);
    throw Object.assign(fail('UBLK_COMMAND', { command: name, id, errno: code }), { code });
  }

  /** What the command ended with meanwhile; undefined: it did not, or it was called off. */
  async #callOff(way: Way): Promise<number | undefined> {
    const { ring } = way;
    ring.put64(ring.prepare(RING_OPERATION.ASYNC_CANCEL, -1, CANCEL) + 4, COMMAND);
    ring.submit();
    const result = await resultWithin(way, CALLED_OFF_MS);
    if (result !== undefined) return CALLED_OFF.includes(-result) ? undefined : result;
    this.#current = undefined;
    this.#givenUp.add(way);
    return undefined;
  }
}

/** A ring, and what its commands carry. */
interface Way {
  readonly ring: IoUring;
  readonly page: Mapping;
  /** Of the command that was given last; undefined while the kernel has it. */
  result: number | undefined;
}

/** @throws SyscallError */
function openWay(): Way {
  const ring = new IoUring({ entries: 4, flags: RING_FLAG.SQE128 });
  try {
    return { ring, page: mapPages(4096), result: undefined };
  } catch (error) {
    ring.close();
    throw error;
  }
}

function closeWay({ ring, page }: Way): void {
  ring.close();
  page.unmap();
}

function resultOf(way: Way): number | undefined {
  way.ring.reap((of, value) => {
    if (of === COMMAND) way.result = value;
  });
  return way.result;
}

async function resultWithin(way: Way, limitMs: number): Promise<number | undefined> {
  const until = Date.now() + limitMs;
  for (let pauseMs = 1; ; pauseMs = Math.min(pauseMs * 2, SLOWEST_LOOK_MS)) {
    const result = resultOf(way);
    if (result !== undefined || Date.now() > until) return result;
    await delay(pauseMs);
  }
}

const EINTR = 4;
const ECANCELED = 125;
/** How a command ends that was called off. */
const CALLED_OFF: readonly number[] = [EINTR, ECANCELED];

interface CommandOptions {
  readonly path?: Buffer;
  readonly length?: number;
  readonly data?: number;
  readonly limitMs?: number;
}

const NO_PATH = Buffer.alloc(0);

function pathOf(id: number): Buffer {
  return Buffer.from(`/dev/ublkc${id}\0`, 'latin1');
}

function isUnprivileged({ flags }: DeviceInfo): boolean {
  return (flags & FEATURE.UNPRIVILEGED) !== 0;
}
