/** Limits as they are typed: at the creation, changed, shown, and of `dsec run`; with a disk limit, what was changed is packed as ever. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { listLoops } from '#linux';
import type { SandboxNode } from '#runtime';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';
import { canServe, ServiceSite } from './service-site.ts';

describe('the route of limits', () => {
  it('takes numbers and null, and nothing else', async () => {
    const asked: unknown[] = [];
    const sandbox = {
      update: async (changes: unknown) => {
        asked.push(changes);
        return {};
      },
    };
    const app = await sandboxApp({ get: () => sandbox } as unknown as SandboxNode);
    const put = async (payload: object) =>
      (await app.inject({ method: 'PUT', url: '/v1/sandboxes/x/limits', payload })).statusCode;
    expect(await put({ cpus: 0.5, memoryBytes: null, pids: 0 })).toBe(200);
    expect(asked).toEqual([{ cpus: 0.5, memoryBytes: null, pids: 0 }]);
    for (const wrong of [{}, { cpus: -1 }, { memoryBytes: 1.5 }, { cpu: 1 }, { pids: 2 ** 54 }]) {
      expect([wrong, await put(wrong)]).toEqual([wrong, 400]);
    }
    await app.close();
  });
});

describe.skipIf(!canServe())('limits, as typed', { timeout: 240_000 }, () => {
  let site: ServiceSite;
  beforeAll(async () => {
    site = await ServiceSite.open({ name: 'limits', applets: ['sh', 'echo', 'dd', 'sleep'] });
  }, 120_000);
  afterAll(() => site?.remove(), 120_000);
  const dsec = (...args: string[]) => site.dsec(...args);

  it('are there from the creation, are changed, and show in what it uses', () => {
    const created = dsec(
      ...['sandbox', 'create', 'bb:1', '--name', 'work', '--json', '--cpus', '0.5', '--memory', '64MiB'],
      ...[
        '--memory-swap',
        '64MiB',
        '--io-write-bps',
        '50MB',
        '--io-read-iops',
        '1000',
        '--disk',
        '32MiB',
        '--inodes',
        '500',
      ],
    );
    expect(created.stderr).toBe('');
    expect(JSON.parse(created.stdout).limits).toEqual({
      ...{ cpus: 0.5, memoryBytes: 64 << 20, memorySwapBytes: 64 << 20, pids: 4096 },
      ...{ ioWriteBps: 50e6, ioReadIops: 1000, diskBytes: 32 << 20, inodes: 500 },
    });
    const fill = ['sandbox', 'exec', 'work', '-n', '--', 'dd', 'if=/dev/zero', 'of=/big', 'bs=1M', 'count=40'];
    expect(dsec(...fill)).toMatchObject({ status: 1, stderr: expect.stringMatching(/No space|quota/) });
    const updated = dsec(
      'sandbox',
      'update',
      'work',
      '--cpus',
      'none',
      '--memory',
      '32MiB',
      '--memory-swap',
      'none',
      '--json',
    );
    expect(JSON.parse(updated.stdout)).toEqual({
      name: 'work',
      limits: {
        memoryBytes: 32 << 20,
        pids: 4096,
        ioWriteBps: 50e6,
        ioReadIops: 1000,
        diskBytes: 32 << 20,
        inodes: 500,
      },
    });
    const [used] = JSON.parse(dsec('sandbox', 'stats', '--json').stdout);
    expect(used).toMatchObject({ name: 'work', pids: 1, limits: { pids: 4096 } });
    expect(used.disk.usedBytes).toBeGreaterThan(25 << 20);
    expect(used.memory.usedBytes).toBeLessThan(32 << 20);
    const table = dsec('sandbox', 'stats', 'work').stdout;
    expect(table).toMatch(
      /^NAME +CPU +CPU TIME +MEMORY +PROCESSES +READ +WRITTEN +DISK\nwork +[\d.]+ % .* \/ 32\.0 MiB +1 \/ 4096 /,
    );
    expect(dsec('sandbox', 'update', 'work')).toMatchObject({ status: 2, stderr: expect.stringContaining('no limit') });
    expect(dsec('sandbox', 'update', 'work', '--memory', '16TiB', '--memory-swap', '1MiB').status).toBe(2);
    expect(dsec('sandbox', 'update', 'no-such', '--cpus', '1').status).toBe(4);
    expect(dsec('sandbox', 'stats', 'no-such').status).toBe(4);
  });

  it('on the disk do not keep what was changed from being packed, while it runs and afterwards', () => {
    expect(dsec('sandbox', 'exec', 'work', '-n', '--', 'sh', '-c', 'echo packed > /made').status).toBe(0);
    expect(dsec('pack-diff', 'work', '--name', 'mid:1')).toMatchObject({ status: 0 });
    expect(dsec('sandbox', 'stop', 'work').status).toBe(0);
    expect(dsec('pack-diff', 'work', '--name', 'end:1')).toMatchObject({ status: 0 });
    for (const image of ['mid:1', 'end:1']) expect(dsec('cat', image, '/made').stdout).toBe('packed\n');
    expect(dsec('sandbox', 'rm', 'work').status).toBe(0);
    expect(listLoops().filter(({ file }) => file.startsWith(site.folder))).toEqual([]);
  });

  it('of one command are told by name, through the service and without it', () => {
    const hog = [
      '--memory',
      '32MiB',
      '--memory-swap',
      '32MiB',
      'bb:1',
      '--',
      'sh',
      '-c',
      'a=x; while :; do a="$a$a"; done',
    ];
    for (const how of [[], ['--runtime', 'dsec']]) {
      const run = dsec('run', ...how, ...hog);
      expect(run).toMatchObject({ status: 137, stderr: expect.stringContaining('memory ran out at --memory') });
    }
    const json = dsec('run', '--json', ...hog);
    expect(JSON.parse(json.stderr.trim().split('\n').at(-1)!)).toMatchObject({ exitCode: 137, outOfMemory: true });
    for (const wrong of [
      ['--cpus', '-1'],
      ['--disk', '5'],
      ['--inodes', '100'],
      ['--memory', 'much'],
    ]) {
      expect([wrong, dsec('run', ...wrong, 'bb:1', '--', 'echo').status]).toEqual([wrong, 2]);
    }
  });
});
