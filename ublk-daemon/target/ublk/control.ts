/**
 * /dev/ublk-control: one command at a time, through a ring of its own. The kernel carries commands out in a thread of its own, so that
 * this one goes on meanwhile: starting a device waits for reads that this process has to answer.
 */
import { closeSync, openSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { messageOf, systemCode } from '#base';
import { errnoName, IoUring, type Mapping, mapPages, RING_FLAG, RING_OPERATION } from '#linux';
import { fail } from '../../errors.ts';
import {
  CONTROL,
  DEV_INFO_BYTES,
  type DeviceInfo,
  decodeDevInfo,
  encodeDevInfo,
  encodeParams,
  FEATURE_NAMES,
  PARAMS_BYTES,
} from './protocol.ts';

const DEVICE = '/dev/ublk-control';
const SLOWEST_LOOK_MS = 20;

/** A command that the kernel refused. `code` names the errno. */
export interface Refusal extends Error {
  readonly code: string;
}

export class UblkControl {
  readonly #fd: number;
  readonly #ring: IoUring;
  readonly #page: Mapping;
  #queue: Promise<unknown> = Promise.resolve();

  /** @throws UBLK_UNAVAILABLE */
  constructor() {
    try {
      this.#fd = openSync(DEVICE, 'r+');
    } catch (error) {
      const missing = systemCode(error) === 'ENOENT';
      throw fail('UBLK_UNAVAILABLE', { reason: missing ? `no ${DEVICE}` : messageOf(error) }, error);
    }
    try {
      this.#ring = new IoUring({ entries: 4, flags: RING_FLAG.SQE128 });
    } catch (error) {
      closeSync(this.#fd);
      throw fail('UBLK_UNAVAILABLE', { reason: messageOf(error) }, error);
    }
    this.#page = mapPages(4096);
  }

  /** A device, not started. The kernel may give less than asked. */
  add(wanted: Omit<DeviceInfo, 'state'>): Promise<DeviceInfo> {
    return this.#run(async () => {
      encodeDevInfo(this.#page.bytes, wanted);
      await this.#command('ADD_DEV', wanted.id, DEV_INFO_BYTES);
      return decodeDevInfo(this.#page.bytes);
    });
  }

  info(id: number): Promise<DeviceInfo> {
    return this.#run(async () => {
      this.#page.bytes.fill(0);
      await this.#command('GET_DEV_INFO', id, DEV_INFO_BYTES);
      return decodeDevInfo(this.#page.bytes);
    });
  }

  setParams(id: number, disk: Parameters<typeof encodeParams>[1]): Promise<void> {
    return this.#run(async () => {
      encodeParams(this.#page.bytes, disk);
      await this.#command('SET_PARAMS', id, PARAMS_BYTES);
    });
  }

  start(id: number): Promise<void> {
    return this.#run(() => this.#command('START_DEV', id, 0, process.pid));
  }

  stop(id: number): Promise<void> {
    return this.#run(() => this.#command('STOP_DEV', id));
  }

  remove(id: number): Promise<void> {
    return this.#run(() => this.#command('DEL_DEV', id));
  }

  startRecovery(id: number): Promise<void> {
    return this.#run(() => this.#command('START_USER_RECOVERY', id));
  }

  endRecovery(id: number): Promise<void> {
    return this.#run(() => this.#command('END_USER_RECOVERY', id, 0, process.pid));
  }

  /** What the driver has, by name; undefined where it cannot tell (before 6.5). */
  features(): Promise<string[] | undefined> {
    return this.#run(async () => {
      this.#page.bytes.fill(0);
      try {
        await this.#command('GET_FEATURES', 0, 8);
      } catch {
        return undefined;
      }
      const bits = this.#page.bytes.readBigUInt64LE(0);
      return FEATURE_NAMES.filter((_, bit) => ((bits >> BigInt(bit)) & 1n) === 1n);
    });
  }

  async close(): Promise<void> {
    await this.#queue;
    this.#ring.close();
    this.#page.unmap();
    closeSync(this.#fd);
  }

  #run<T>(work: () => Promise<T>): Promise<T> {
    const done = this.#queue.then(work);
    this.#queue = done.catch(() => {});
    return done;
  }

  async #command(name: keyof typeof CONTROL, id: number, length = 0, data = 0): Promise<void> {
    const ring = this.#ring;
    const at = ring.prepare(RING_OPERATION.URING_CMD, this.#fd, 1);
    const { words } = ring;
    words[at + 2] = CONTROL[name];
    // struct ublksrv_ctrl_cmd: device, queue (none) and length, address, data.
    words[at + 12] = id;
    words[at + 13] = (length << 16) | 0xffff;
    ring.put64(at + 14, length > 0 ? this.#page.address : 0);
    ring.put64(at + 16, data);
    ring.submit();
    let result = 0;
    for (let pauseMs = 1; ring.ready === 0; pauseMs = Math.min(pauseMs * 2, SLOWEST_LOOK_MS)) await delay(pauseMs);
    ring.reap((_, value) => {
      result = value;
    });
    if (result >= 0) return;
    const code = errnoName(-result);
    throw Object.assign(fail('UBLK_COMMAND', { command: name, id, errno: code }), { code });
  }
}
