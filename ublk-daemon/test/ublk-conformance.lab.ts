/** The suite of every way out, over a real ublk device: read and written past the page cache. */
import { execFileSync } from 'node:child_process';
import { constants, readFileSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { afterAll, beforeAll, expect } from 'vitest';
import type { BlockTarget } from '../target/block-target.ts';
import { serveUblk, type UblkDevice } from '../target/ublk/device.ts';
import { aligned, O_DIRECT } from './aligned-buffer.ts';
import { ShellCommands } from './shell-commands.ts';
import { type Attached, targetConformance, type WayOut } from './target-conformance.ts';

let shell: ShellCommands;

beforeAll(() => {
  execFileSync('modprobe', ['ublk_drv']);
  shell = new ShellCommands();
});
afterAll(() => shell.close());

async function positiveErrno<T>(work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    const { errno } = error as { errno?: number };
    throw Object.assign(new Error(String(error)), { errno: Math.abs(errno ?? 0) });
  }
}

function ublk(): WayOut {
  const devices = new Map<BlockTarget, UblkDevice>();
  const handles = new Set<FileHandle>();
  return {
    name: 'ublk',
    exact: false,
    async attach(target) {
      let device = devices.get(target);
      if (device === undefined) {
        device = await serveUblk({ target });
        devices.set(target, device);
      }
      const { path, id } = device;
      const access = (target.readOnly ? constants.O_RDONLY : constants.O_RDWR) | O_DIRECT;
      const handle = await open(path, access);
      const durable = await open(path, access | constants.O_DSYNC);
      handles.add(handle).add(durable);
      const queue = (name: string) => readFileSync(`/sys/block/ublkb${id}/${name}`, 'latin1').trim();
      const put = async (into: FileHandle, offset: number, data: Buffer) => {
        const bytes = aligned(data.length);
        data.copy(bytes);
        await positiveErrno(into.write(bytes, 0, bytes.length, offset));
      };
      const attached: Attached = {
        sizeBytes: Number(queue('size')) * 512,
        blockSize: Number(queue('queue/logical_block_size')),
        async read(offset, length) {
          const bytes = aligned(length);
          const { bytesRead } = await positiveErrno(handle.read(bytes, 0, length, offset));
          expect(bytesRead).toBe(length);
          return bytes;
        },
        write: (offset, data, options) => put(options?.fua ? durable : handle, offset, data),
        flush: () => positiveErrno(handle.datasync()),
        discard: async (offset, length) => void (await shell.run(`blkdiscard -o ${offset} -l ${length} ${path}`)),
        writeZeroes: async (offset, length) =>
          void (await shell.run(`blkdiscard -z -o ${offset} -l ${length} ${path}`)),
        async detach() {
          for (const opened of [handle, durable]) {
            handles.delete(opened);
            await opened.close();
          }
        },
      };
      return attached;
    },
    async stop() {
      for (const handle of handles) await handle.close();
      handles.clear();
      for (const device of devices.values()) await device.stop();
      devices.clear();
    },
  };
}

targetConformance(ublk());
