/** A state folder with no space left: what a command did is passed on, and sandboxes can be packed and removed. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import {
  listSandboxes,
  reclaimSandboxes,
  removeSandbox,
  runtimeFolders,
  stopSandbox,
  withKeptSandbox,
} from '../index.ts';
import { readRecord, writeRecord } from '../sandbox/sandbox-record.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import { busybox, canRun, Site } from './sandbox-fixture.ts';

describe.skipIf(!canRun())('with the state folder full', () => {
  let site: Site;
  let base: Image;
  let stateDir: string;
  beforeAll(async () => {
    site = await new Site().open();
    base = await site.image('bb:1', [busybox], { Env: ['PATH=/bin'], Cmd: ['true'] });
    stateDir = join(site.root, 'small');
    fs.mkdirSync(stateDir);
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=1m,mode=700', 'dsec-test', stateDir]);
  });
  afterAll(async () => {
    await removeSandbox('stays', folders()).catch(() => {});
    execFileSync('umount', ['-l', stateDir]);
    await site.remove();
  });
  const folders = () => runtimeFolders({ ...site.folders, stateDir });
  const places = () => sandboxFolders(folders(), 'stays');
  const entries = () => fs.readdirSync(join(stateDir, 'sandboxes')).filter((name) => name !== '.locks');
  const fill = () => {
    const fd = fs.openSync(join(stateDir, 'filler'), 'a');
    try {
      for (;;) fs.writeSync(fd, Buffer.alloc(4096));
    } catch (error) {
      expect(error).toMatchObject({ code: 'ENOSPC' });
    } finally {
      fs.closeSync(fd);
    }
  };

  it('a kept run passes the status of its command on; its sandbox can be packed and removed', async () => {
    const script = 'echo kept > /file; dd if=/dev/zero of=/big bs=4096 2>/dev/null; exit 7';
    const ran = await site.run(base, ['sh', '-c', script], { keep: true, name: 'stays', folders: folders() });
    expect(ran.exitCode).toBe(7);
    fill();
    const record = readRecord(places().record)!;
    expect(() => writeRecord(places().record, record, true)).toThrow(
      expect.objectContaining({ code: 'RUNTIME_RECORD_WRITE', hint: expect.stringContaining(stateDir) as string }),
    );
    expect(readRecord(places().record)).toEqual(record);
    const packed = await withKeptSandbox(
      'stays',
      async ({ upper }) => fs.readFileSync(join(upper, 'file'), 'utf8'),
      folders(),
    );
    expect(packed).toBe('kept\n');
    await removeSandbox('stays', folders());
    expect(entries()).toEqual([]);
    fs.rmSync(join(stateDir, 'filler'));
  });

  it('a command that has filled it can be stopped', async () => {
    let stopped: ReturnType<typeof stopSandbox> | undefined;
    await site.run(base, ['sh', '-c', 'dd if=/dev/zero of=/big bs=4096 2>/dev/null; echo full; exec sleep 1000'], {
      name: 'stays',
      folders: folders(),
      stdio: {
        onStdout: () => {
          stopped = stopSandbox('stays', { folders: folders(), timeMs: 30_000 });
        },
      },
    });
    // By SIGTERM, not by the SIGKILL that comes late.
    expect(await stopped).toMatchObject({ killed: false });
    expect(entries()).toEqual([]);
  });

  it('a record that cannot be written is told beside the status, and written later', async () => {
    const blocked = `${places().record}.tmp`;
    const ran = await site.run(base, ['sh', '-c', 'echo here; read line; exit 9'], {
      keep: true,
      name: 'stays',
      folders: folders(),
      stdio: { stdin: undefined, onStdout: () => fs.mkdirSync(blocked) },
    });
    expect(ran).toMatchObject({ exitCode: 9, upper: places().upper, problem: expect.stringContaining(blocked) });
    expect(readRecord(places().record)).toMatchObject({ state: 'running', keep: true });
    // With no room for the record the sandbox is there all the same.
    fill();
    expect(await withKeptSandbox('stays', async ({ state }) => state, folders())).toBe('kept');
    fs.rmSync(join(stateDir, 'filler'));
    expect(await reclaimSandboxes(folders())).toMatchObject({ kept: ['stays'], problems: [] });
    expect(listSandboxes(folders())).toMatchObject([{ name: 'stays', state: 'kept' }]);
  });

  it('a removal that was killed half way is finished by the next command', async () => {
    fs.renameSync(places().folder, join(stateDir, 'sandboxes/.removing-stays-0123abcd'));
    expect(listSandboxes(folders())).toEqual([]);
    expect(await reclaimSandboxes(folders())).toMatchObject({ removed: [], problems: [] });
    expect(entries()).toEqual([]);
  });
});
