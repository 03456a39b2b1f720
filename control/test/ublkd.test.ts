/**
 * `dsec serve ublkd` and the commands that use it, as processes: attached disks are used by qemu-io and qemu-img over NBD, the service is killed
 * and ended, and nothing of what it answered is lost or left.
 */
import { spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { request } from 'node:http';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { describe, expect, test } from 'vitest';
import { blockService, PROGRAM, WAIT_MS } from './ublkd-service.ts';

const hasTools = ['qemu-io', 'qemu-img'].every((tool) => spawnSync(tool, ['--version']).status === 0);
if (!hasTools) console.log('skipped: ublkd: qemu-io missing (apt-get install qemu-utils)');

describe.skipIf(!hasTools)('the block service', { timeout: 240_000 }, () => {
  const {
    root,
    start,
    run,
    dsec,
    json,
    refused,
    until,
    serve,
    end,
    qemuIo,
    ask,
    load,
    writesOf,
    nothingLeft,
    servicePid,
    writeRaw,
  } = blockService();

  test('attach, use, snapshot, compact, pack and export while it is used, detach', async () => {
    await dsec('disk', 'create', 'work', '--size', '64M');
    const service = await serve('--detach');
    const attached = await json('disk', 'attach', 'work', '--way', 'nbd');
    const at = `nbd+unix:///work?socket=${root}/run/ublkd/disk-work.nbd`;
    expect(attached).toMatchObject({ name: 'work', kind: 'disk', state: 'attached', way: 'nbd', at, readOnly: false });
    expect(statSync(join(root, 'run/ublkd.sock')).mode & 0o777).toBe(0o600);
    // Again: the same.
    expect(await dsec('disk', 'attach', 'work')).toBe(`${at}\n`);
    expect(await refused('UBLKD_ATTACHED', 1, 'disk', 'attach', 'work', '--read-only')).toContain(at);
    expect(await dsec('disk', 'ls')).toContain(at);

    await qemuIo(at, 'write -P 1 0 1M', 'write -P 1 8M 1M', 'flush');
    // Somebody who writes all the time, beyond what is looked at.
    const endLoad = load(at, 32 << 20);
    while ((await writesOf('work')) < 100) await delay(20);
    const snapshot = await json('disk', 'snapshot', 'work', 'one');
    expect(snapshot).toMatchObject({ disk: 'work', snapshot: 'one' });
    expect(existsSync(snapshot.layer)).toBe(true);
    await qemuIo(at, 'write -P 2 0 64k', 'discard 8M 512k', 'flush');
    await dsec('disk', 'snapshot', 'work', 'two');
    await qemuIo(at, 'write -P 3 128k 64k', 'write -P 9 1M 1M', 'write -P 3 1M 1M', 'flush');
    const packed = await json('disk', 'pack-diff', 'work', '--since', 'one', '-o', 'diff.lsmt');
    expect(packed).toMatchObject({ disk: 'work', path: 'diff.lsmt' });
    await dsec('disk', 'export', 'raw', 'work', 'now.raw');
    expect((await json('disk', 'compact', 'work')).reclaimedBytes).toBeGreaterThan(0);
    await refused('UBLKD_REMOVE_ATTACHED', 1, 'disk', 'rm', 'work');
    for (const [path, body, code] of [
      ['snapshot', { snapshot: 'one' }, 'DISK_SNAPSHOT_EXISTS'],
      ['pack-diff', { since: 'none', output: join(root, 'x') }, 'DISK_SNAPSHOT_MISSING'],
      ['pack-diff', { since: 'one', whole: true, output: join(root, 'x') }, 'UBLKD_REQUEST'],
      ['pack-diff', { output: join(root, 'now.raw') }, 'DISK_OUTPUT_EXISTS'],
      ['export', { format: 'raw', output: join(root, 'now.raw') }, 'DISK_OUTPUT_EXISTS'],
    ] as const) {
      expect(JSON.parse((await ask(`/v1/disks/work/${path}`, 'POST', body)).text).error.code).toBe(code);
    }
    const client = start('qemu-io', ['-f', 'raw', '-r', '-c', 'sleep 600000', at]);
    while (JSON.parse((await ask('/v1/disks/work')).text).usedBy === undefined) await delay(20);
    expect(await refused('UBLKD_IN_USE', 1, 'disk', 'detach', 'work')).toContain('client');
    client.child.kill('SIGKILL');
    await client.ended;
    await endLoad();

    const state = JSON.parse((await ask('/v1/disks/work')).text);
    expect(state).toMatchObject({ layers: 3, state: 'attached', working: [] });
    const { text: metrics } = await ask('/metrics');
    expect(Number(/operations_total\{disk="work",operation="write"\} (\d+)/.exec(metrics)![1])).toBeGreaterThan(100);
    expect(metrics).toContain('dsec_disk_errors_total{disk="work",operation="write"} 0');
    expect(metrics).toContain('dsec_disks{state="attached",way="nbd"} 1');
    expect(JSON.parse((await ask('/openapi.json')).text).paths['/v1/disks/{name}/pack-diff'].post.operationId).toBe(
      'packDiff',
    );
    expect((await ask('/docs')).text).toContain('DSec block service');
    expect([(await ask('/healthz')).status, (await ask('/readyz')).status]).toEqual([200, 200]);

    expect(await json('disk', 'detach', 'work')).toEqual([{ name: 'work', state: 'detached' }]);
    // What was packed lies on the snapshot and gives what the disk had.
    await dsec('disk', 'restore', 'work', 'one', 'older');
    const base = JSON.parse(readFileSync(join(root, 'state/disks/older/config.v1.json'), 'utf8')).lowers;
    const stacked = { lowers: [...base, { file: join(root, 'diff.lsmt') }] };
    writeFileSync(join(root, 'stack.json'), JSON.stringify(stacked));
    await dsec('disk', 'create', 'again', '--from', `config:${root}/stack.json`);
    for (const disk of ['again', 'work']) {
      const { at: there } = await json('disk', 'attach', disk, '--read-only');
      await qemuIo(
        ...([there, 'read -P 2 0 64k', 'read -P 1 64k 64k', 'read -P 3 128k 64k', 'read -P 1 192k 832k'] as const),
        ...['read -P 3 1M 1M', 'read -P 0 8M 512k', 'read -P 1 8704k 512k'],
      );
      await dsec('disk', 'detach', disk);
    }
    const raw = readFileSync(join(root, 'now.raw'));
    expect([raw[0], raw[65536], raw[131072], raw[1 << 20], raw[8 << 20]]).toEqual([2, 1, 3, 3, 0]);
    const { status, stderr } = await end(service);
    expect([status, stderr.includes('"level":50')]).toEqual([0, false]);
    nothingLeft();
  });

  test('a service that is killed under load is followed by one at the same address, with every flushed write', async () => {
    await dsec('disk', 'create', 'work', '--size', '64M');
    truncateSync(join(root, writeRaw('b.raw')), 8 << 20);
    let service = await serve();
    const { at } = await json('disk', 'attach', 'work', '--way', 'nbd');
    const file = await json('disk', 'attach', './b.raw', '--at', 'tcp:127.0.0.1:0');
    expect(file.at).toMatch(/^nbd:\/\/127\.0\.0\.1:\d+\/b\.raw$/);
    await qemuIo(file.at, 'write -P 6 1M 1M', 'flush');
    for (let round = 1; round <= 2; round++) {
      await qemuIo(at, `write -P ${round} ${round}M 1M`, 'flush');
      const endLoad = load(at, 16 << 20);
      const before = await writesOf('work');
      while ((await writesOf('work')) < before + 50) await delay(10);
      await end(service, 'SIGKILL');
      await endLoad();
      service = await serve();
      expect(service.said()).toContain('2 attached');
      expect((await json('disk', 'ls')).map((disk: { attached: { at: string } }) => disk.attached.at)).toEqual([
        at,
        file.at,
      ]);
      await qemuIo(at, ...Array.from({ length: round }, (_, done) => `read -P ${done + 1} ${done + 1}M 1M`));
    }
    await qemuIo(file.at, 'read -P 6 1M 1M');
    // In good order: the disks stay attached for the next one, and the command line without a service is told so.
    expect((await end(service)).status).toBe(0);
    await refused('UBLKD_NONE', 4, 'disk', 'detach', 'work');
    // Attached all the same: nothing that its users would lose.
    expect(await refused('UBLKD_REMOVE_ATTACHED', 1, 'disk', 'rm', 'work')).toContain(at);
    await refused('UBLKD_SHRINK', 1, 'disk', 'resize', 'work', '--size', '8M', '--shrink');
    service = await serve('--detach');
    await qemuIo(at, 'read -P 2 2M 1M');
    expect((await end(service)).status).toBe(0);
    expect(JSON.parse(readFileSync(join(root, 'state/ublkd/table.json'), 'utf8')).disks).toEqual([]);
    nothingLeft();
  });

  test('attach starts a service, once, which ends when nothing is attached', async () => {
    await dsec('disk', 'create', 'a', '--size', '8M');
    await dsec('disk', 'create', 'b', '--size', '8M');
    const [a, b, again] = await Promise.all([
      json('disk', 'attach', 'a', '--way', 'nbd'),
      json('disk', 'attach', 'b', '--way', 'nbd'),
      json('disk', 'attach', 'a', '--way', 'nbd'),
    ]);
    expect(again).toEqual(a);
    expect(b.at).not.toBe(a.at);
    await qemuIo(a.at, 'write -P 1 0 4k');
    await dsec('disk', 'detach', 'a', 'b');
    const pid = servicePid()!;
    process.kill(pid, 'SIGTERM');
    await until('the end of the service', () => !existsSync(`/proc/${pid}`));
    expect(readFileSync(join(root, 'run/ublkd.log'), 'utf8')).toBe('');
    nothingLeft();
    const short = await serve('--idle', '500ms');
    expect((await short.ended).status).toBe(0);
    nothingLeft();
  });

  test('a second service is refused, and so is a damaged table', async () => {
    const service = await serve();
    const lock = join(root, 'state/ublkd/lock');
    const second = await run('serve', 'ublkd');
    expect([second.status, second.stderr]).toEqual([1, expect.stringContaining(lock)]);
    // Another state folder, the same run folder.
    const other = start(process.execPath, [PROGRAM, 'serve', 'ublkd'], { DSEC_STATE: join(root, 'state2') });
    expect((await other.ended).stderr).toContain(join(root, 'run/ublkd/lock'));
    // A disk of that name is another one there: neither is taken for the other.
    for (const command of ['attach', 'detach']) {
      const args = [PROGRAM, 'disk', command, 'work', '--json'];
      const { stderr } = await start(process.execPath, args, { DSEC_STATE: join(root, 'state2') }).ended;
      expect(JSON.parse(stderr).error.code).toBe('UBLKD_OTHER_DISKS');
    }
    await end(service);
    rmSync(join(root, 'state2'), { recursive: true });
    const table = join(root, 'state/ublkd/table.json');
    writeFileSync(table, '{');
    const { status, stderr } = await run('serve', 'ublkd');
    expect([status, stderr]).toEqual([3, expect.stringContaining(table)]);
    // It is left for whoever mends it.
    expect(readFileSync(table, 'utf8')).toBe('{');
    expect(await refused('UBLKD_START', 1, 'disk', 'attach', 'a')).toContain(table);
  });

  test('a disk that cannot be opened is listed with its reason, tried again, and forgotten', async () => {
    await dsec('disk', 'create', 'gone', '--size', '8M');
    await dsec('disk', 'create', 'stays', '--size', '8M');
    let service = await serve();
    const { at } = await json('disk', 'attach', 'gone', '--at', 'unix:mine.sock');
    expect(at).toBe(`nbd+unix:///gone?socket=${root}/mine.sock`);
    await dsec('disk', 'attach', 'stays');
    await end(service, 'SIGKILL');
    const folder = join(root, 'state/disks');
    spawnSync('mv', [join(folder, 'gone'), join(folder, '..', 'away')]);
    service = await serve();
    expect(service.said()).toContain('2 attached, 1 of them not served');
    const listed = await json('disk', 'ls');
    expect(
      listed.map(({ name, attached }: { name: string; attached: { state: string } }) => [name, attached.state]),
    ).toEqual([
      ['stays', 'attached'],
      ['gone', 'failed'],
    ]);
    expect(listed[1].attached.problem).toContain('DISK_NOT_FOUND');
    await refused('DISK_NOT_FOUND', 4, 'disk', 'attach', 'gone');
    expect((await ask('/v1/disks/gone/snapshot', 'POST', { snapshot: 'x' })).text).toContain('UBLKD_FAILED');
    spawnSync('mv', [join(folder, '..', 'away'), join(folder, 'gone')]);
    expect(await dsec('disk', 'attach', 'gone')).toBe(`${at}\n`);
    await qemuIo(at, 'read -P 0 0 1M');
    await end(service, 'SIGKILL');
    rmSync(join(folder, 'gone'), { recursive: true });
    service = await serve('--detach');
    await dsec('disk', 'detach', 'gone');
    expect(existsSync(join(root, 'mine.sock'))).toBe(false);
    await refused('UBLKD_NOT_ATTACHED', 4, 'disk', 'detach', 'gone');
    expect((await json('disk', 'ls')).map(({ name }: { name: string }) => name)).toEqual(['stays']);
    await end(service);
    nothingLeft();
  });

  test('what a crash left between a socket and the table is removed, what lives is not', async () => {
    await dsec('disk', 'create', 'a', '--size', '8M');
    let service = await serve();
    await dsec('disk', 'attach', 'a', '--way', 'nbd');
    await end(service, 'SIGKILL');
    const table = join(root, 'state/ublkd/table.json');
    const socket = join(root, 'run/ublkd/disk-a.nbd');
    writeFileSync(table, JSON.stringify({ format: 'dsec-attached-disks', version: 1, disks: [] }));
    const alive = createServer().listen(join(root, 'run/ublkd/alive.nbd'));
    await once(alive, 'listening');
    expect(existsSync(socket)).toBe(true);
    service = await serve();
    expect(service.complained()).toContain(socket);
    expect(existsSync(socket)).toBe(false);
    expect(existsSync(join(root, 'run/ublkd/alive.nbd'))).toBe(true);
    alive.close();
    // A crash right between the two files of the table changes nothing.
    await end(service);
    service = start(process.execPath, [PROGRAM, 'serve', 'ublkd'], { DSEC_FAILPOINT: 'ublkd-table-written' }) as never;
    // Its socket is there a moment before it can be connected to.
    await until('the service', () => service.said().includes('block service at'));
    await expect(ask('/v1/disks', 'POST', { disk: 'a', way: 'nbd' })).rejects.toThrow();
    await service.ended;
    expect(existsSync(socket)).toBe(true);
    service = await serve();
    expect(existsSync(socket)).toBe(false);
    expect((await json('disk', 'ls'))[0].attached).toBeUndefined();
    await end(service);
    nothingLeft();
  });

  test('what cannot be attached is refused, and nothing stays open', async () => {
    await dsec('disk', 'create', 'a', '--size', '8M');
    const service = await serve();
    const hasUblk = existsSync('/dev/ublk-control');
    for (const [body, code] of [
      [{ disk: 'none' }, 'DISK_NOT_FOUND'],
      [{ disk: '.x' }, 'DISK_NAME'],
      [{ file: join(root, 'none.raw') }, 'UBLKD_FILE'],
      [{ file: root }, 'UBLKD_FILE'],
      [{ file: '/dev/null' }, 'TARGET_FILE_KIND'],
      [{ disk: 'a', way: 'ublk' }, hasUblk ? undefined : 'UBLKD_WAY'],
      [{ disk: 'a', address: 'tcp:0.0.0.0:1' }, 'NBD_ADDRESS'],
      [{ disk: 'a', address: 'unix:/none/x.sock' }, 'NBD_LISTEN'],
    ] as const) {
      if (code === undefined) continue;
      const { text } = await ask('/v1/disks', 'POST', body);
      expect([body, JSON.parse(text).error.code]).toEqual([body, code]);
    }
    expect(JSON.parse((await ask('/v1/disks')).text).disks).toEqual([]);
    // Its status as a command has it, and the lock of the disk is free.
    await refused('DISK_NOT_FOUND', 4, 'disk', 'attach', 'none');
    await dsec('disk', 'compact', 'a');
    await end(service);
  });

  test('requests that are none are refused', async () => {
    const service = await serve();
    for (const [method, path, body, status, code] of [
      ['POST', '/v1/disks', {}, 400, 'UBLKD_REQUEST'],
      ['POST', '/v1/disks', { disk: 'a', file: '/b' }, 400, 'UBLKD_REQUEST'],
      ['POST', '/v1/disks', { disk: 'a', more: 1 }, 400, 'SERVER_BAD_REQUEST'],
      ['POST', '/v1/disks', { file: 'relative' }, 400, 'SERVER_BAD_REQUEST'],
      ['POST', '/v1/disks', { disk: 'a', address: 'unix:relative' }, 400, 'SERVER_BAD_REQUEST'],
      ['POST', '/v1/disks', { disk: 'a'.repeat(70_000) }, 413, 'SERVER_BODY_TOO_LARGE'],
      ['POST', '/v1/disks/a/pack-diff', { output: '/x', blockSizeKiB: 5 }, 400, 'SERVER_BAD_REQUEST'],
      ['POST', '/v1/disks/a/compact', undefined, 404, 'UBLKD_NOT_ATTACHED'],
      ['DELETE', '/v1/disks/%2Fx', undefined, 404, 'UBLKD_NOT_ATTACHED'],
      ['GET', '/v2/disks', undefined, 404, 'UBLKD_ROUTE'],
    ] as const) {
      const answer = await ask(path, method, body);
      expect([path, answer.status, JSON.parse(answer.text).error.code]).toEqual([path, status, code]);
    }
    await end(service);
  });

  test('the same disk attached and detached by many at once', async () => {
    await dsec('disk', 'create', 'a', '--size', '8M');
    const service = await serve();
    const answers = await Promise.all(
      Array.from({ length: 60 }, (_, at) =>
        at % 3 === 2 ? ask('/v1/disks/a?force=true', 'DELETE') : ask('/v1/disks', 'POST', { disk: 'a', way: 'nbd' }),
      ),
    );
    expect(answers.filter(({ status }) => ![200, 201, 404].includes(status))).toEqual([]);
    expect(answers.filter(({ status }) => status === 201).length).toBeGreaterThan(0);
    await ask('/v1/disks/a', 'DELETE');
    expect(readdirSync(join(root, 'run/ublkd'))).toEqual(['lock']);
    await dsec('disk', 'snapshot', 'a', 'free');
    await end(service);
    nothingLeft();
  });

  test('forced, a disk is taken away from a client; a layer ends with the caller who asked for it', async () => {
    await dsec('disk', 'create', 'a', '--size', '128M');
    const service = await serve();
    const { at } = await json('disk', 'attach', 'a', '--way', 'nbd');
    const client = start('qemu-io', ['-f', 'raw', '-r', '-c', 'sleep 600000', at]);
    while (JSON.parse((await ask('/v1/disks/a')).text).usedBy === undefined) await delay(20);
    expect(await dsec('disk', 'detach', '--force', 'a')).toBe('a: detached\n');
    client.child.kill('SIGKILL');
    await client.ended;
    await dsec('disk', 'attach', 'a', '--way', 'nbd');
    writeFileSync(join(root, 'noise'), randomBytes(128 << 20));
    expect((await start('qemu-img', ['convert', '-n', '-f', 'raw', '-O', 'raw', 'noise', at]).ended).status).toBe(0);
    rmSync(join(root, 'noise'));
    const begun = (name: string) => readdirSync(root).some((other) => other.startsWith(name));
    const output = join(root, 'a.zst');
    const asked = request({
      socketPath: join(root, 'run/ublkd.sock'),
      path: '/v1/disks/a/pack-diff',
      method: 'POST',
      headers: { 'content-type': 'application/json' },
    });
    asked.once('error', () => {});
    asked.end(JSON.stringify({ output, compress: 'zstd' }));
    await until('the layer', () => begun('a.zst.part'));
    asked.destroy();
    await until('its end', () => !begun('a.zst'));
    expect(JSON.parse((await ask('/v1/disks/a')).text).working).toEqual([]);
    await dsec('disk', 'detach', 'a');
    await end(service);
  });

  test.skipIf(process.getuid?.() !== 0)(
    'with a full state folder attach is refused and undone, detach works',
    async () => {
      const state = join(root, 'state');
      mkdirSync(join(state, 'ublkd'), { recursive: true });
      await dsec('disk', 'create', 'a', '--size', '8M');
      await dsec('disk', 'create', 'b', '--size', '8M');
      expect(spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=64k', 'dsec-test', join(state, 'ublkd')]).status).toBe(0);
      try {
        const service = await serve();
        await dsec('disk', 'attach', 'a', '--way', 'nbd');
        spawnSync('dd', ['if=/dev/zero', `of=${state}/ublkd/full`, 'bs=4k'], { stdio: 'ignore' });
        await refused('UBLKD_TABLE_WRITE', 1, 'disk', 'attach', 'b', '--way', 'nbd');
        expect(existsSync(join(root, 'run/ublkd/disk-b.nbd'))).toBe(false);
        expect((await ask('/readyz')).text).toContain('UBLKD_NOT_READY');
        await dsec('disk', 'detach', 'a');
        rmSync(join(state, 'ublkd/full'));
        for (const late = Date.now() + WAIT_MS; (await ask('/readyz')).status !== 200; await delay(100)) {
          expect(Date.now()).toBeLessThan(late);
        }
        expect(JSON.parse(readFileSync(join(state, 'ublkd/table.json'), 'utf8')).disks).toEqual([]);
        await end(service);
      } finally {
        spawnSync('umount', [join(state, 'ublkd')]);
      }
    },
  );

  test.skipIf(process.getuid?.() !== 0)('work on a disk that finds no room is refused with what to do', async () => {
    const state = join(root, 'state');
    mkdirSync(state, { recursive: true });
    expect(spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=4m', 'dsec-test', state]).status).toBe(0);
    try {
      await dsec('disk', 'create', 'a', '--size', '8M');
      const service = await serve();
      const { at } = await json('disk', 'attach', 'a', '--way', 'nbd');
      await qemuIo(at, 'write -P 1 0 1M', 'flush');
      spawnSync('dd', ['if=/dev/zero', `of=${state}/full`, 'bs=4k'], { stdio: 'ignore' });
      for (const args of [
        ['snapshot', 'a', 'one'],
        ['resize', 'a', '--size', '16M'],
        ['compact', 'a'],
      ]) {
        expect(await refused('UBLKD_NO_SPACE', 1, 'disk', ...args)).toContain('ENOSPC');
      }
      rmSync(join(state, 'full'));
      await dsec('disk', 'snapshot', 'a', 'one');
      await qemuIo(at, 'read -P 1 0 1M');
      await dsec('disk', 'detach', 'a');
      await end(service);
    } finally {
      spawnSync('umount', [state]);
    }
  });
});
