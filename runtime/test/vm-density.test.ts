/**
 * What keeps many virtual machines small, as a sandbox has it that asked for nothing: looked up in two guests that run, which began from a template and have
 * drives on virtio-pmem and a network all the same; and that the host holds their layers once.
 */
import { randomBytes } from 'node:crypto';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { openImage } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { COLD_AFTER_MS, REPORTING_ORDER } from '../vm/guest-memory.ts';
import { findProcess, readMachineRecord } from '../vm/qemu/machine-process.ts';
import { vmPlaces } from '../vm/vm-places.ts';
import { prepareTemplate } from '../vm/warm-pool/prepare-template.ts';
import { tcp } from './network-inside.ts';
import { NetworkSite } from './network-site.ts';
import { hasNetworkTools } from './network-tools.ts';
import { HOST4, NEIGHBOUR4 } from './network-world.ts';
import { say } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRunVms } from './vm-site.ts';

const MIB = 1 << 20;
const SIZE = { cpus: 1, memoryBytes: 256 * MIB };
const DATA = 24 * MIB;

describe.skipIf(!canRunVms() || !hasNetworkTools())('what a guest has by default', { timeout: 600_000 }, () => {
  let all: NetworkSite;
  const boxes: NodeSandbox[] = [];
  const notes: string[] = [];
  const placesOf = (box: NodeSandbox) => vmPlaces(all.site.folders.runDir, box.facts.id);
  beforeAll(async () => {
    all = await NetworkSite.open({ vmPool: true, onNote: (text) => notes.push(text) });
    const { fill } = TEST_IMAGES.find(({ name }) => name === 'debian-like')!;
    const data = randomBytes(DATA);
    await all.site.image('data:1', [fill, (folder) => fs.writeFileSync(join(folder, 'data'), data)]);
    await prepareTemplate(SIZE, all.site.folders, findAgent()!.path);
    const base = await openImage(all.site.store, 'data:1');
    const policy = { default: 'deny', rules: [{ allow: HOST4, ports: [80] }] };
    for (let i = 0; i < 2; i++)
      boxes.push(await all.create(policy, { backend: 'microvm', ...SIZE, diskBytes: 256 * MIB, base }));
  }, 600_000);
  afterAll(() => all?.remove(), 300_000);

  it('begins from the template, with memory of its own', () => {
    expect(notes.filter((text) => text.includes('booted'))).toEqual([]);
    for (const box of boxes) {
      expect(readMachineRecord(placesOf(box).folder)).toMatchObject({
        spec: { lateDevices: true },
        privateMemory: false,
      });
      expect(box.facts.vm?.memory).toEqual({ pmem: true, reporting: true, damon: true });
    }
  });

  it('DAMON gives up file pages that are cold', async () => {
    const admin = '/sys/kernel/mm/damon/admin/kdamonds/0';
    const scheme = `${admin}/contexts/0/schemes/0`;
    const read = async (path: string) => (await say(boxes[0]!, `cat ${path}`)).trim();
    expect(await read(`${admin}/state`)).toBe('on');
    expect(Number(await read(`${admin}/pid`))).toBeGreaterThan(0);
    expect(await read(`${admin}/contexts/0/operations`)).toBe('paddr');
    expect(await read(`${scheme}/action`)).toBe('pageout');
    expect(await read(`${scheme}/filters/0/type`)).toBe('anon');
    expect(await read(`${scheme}/filters/0/matching`)).toBe('Y');
    expect(await read(`${scheme}/access_pattern/nr_accesses/max`)).toBe('0');
    const [age, aggregated] = [
      Number(await read(`${scheme}/access_pattern/age/min`)),
      Number(await read(`${admin}/contexts/0/monitoring_attrs/intervals/aggr_us`)),
    ];
    expect((age * aggregated) / 1000).toBe(COLD_AFTER_MS);
  });

  it('its balloon reports free pages, in small blocks', async () => {
    expect(await say(boxes[0]!, 'cat /sys/module/page_reporting/parameters/page_reporting_order')).toBe(
      `${REPORTING_ORDER}\n`,
    );
    // Bit 5 of what device and driver have agreed upon.
    const features = await say(
      boxes[0]!,
      'for one in /sys/bus/virtio/drivers/virtio_balloon/virtio*; do cat $one/features; done',
    );
    expect(features.trim()).toMatch(/^[01]{5}1/);
  });

  it('reads its layers in place: nothing of them is in its own memory, and on the host all of them are there once', async () => {
    const cached = async (box: NodeSandbox) =>
      Number(/^Cached:\s+(\d+)/m.exec(await say(box, 'cat /proc/meminfo'))![1]) * 1024;
    for (const box of boxes) {
      const before = await cached(box);
      expect(await say(box, `cat /data | cat > /dev/null; echo read`)).toBe('read\n');
      expect((await cached(box)) - before).toBeLessThan(DATA / 4);
    }
    const maps = boxes.map((box) => layerMaps(findProcess(placesOf(box).folder)!));
    expect(maps[0]!.files).toEqual(maps[1]!.files);
    for (const { residentBytes, sharedBytes, dirtyBytes } of maps) {
      expect(residentBytes).toBeGreaterThanOrEqual(DATA);
      // Counted for both of them, held once.
      expect(sharedBytes).toBeGreaterThanOrEqual(DATA);
      expect(dirtyBytes).toBe(0);
    }
  });

  it('has a network of its own, that it found when it woke up', async () => {
    const addresses = await Promise.all(boxes.map((box) => say(box, 'cat /sys/class/net/eth0/address')));
    expect(new Set(addresses).size).toBe(2);
    for (const box of boxes) {
      expect(await tcp(box, HOST4, 80)).toContain('tcp 80');
      expect(await tcp(box, NEIGHBOUR4, 80)).toBe('refused');
    }
  });
});

/** Of files of layers, as a process has them mapped. */
function layerMaps(pid: number) {
  const files: string[] = [];
  const bytes = { residentBytes: 0, sharedBytes: 0, dirtyBytes: 0 };
  let isLayer = false;
  for (const line of fs.readFileSync(`/proc/${pid}/smaps`, 'utf8').split('\n')) {
    if (/^[0-9a-f]+-[0-9a-f]+ /.test(line)) {
      isLayer = line.includes('/vm-layers/');
      if (isLayer) files.push(line.slice(line.indexOf('/')));
      continue;
    }
    const found = /^(Rss|Shared_Clean|Shared_Dirty|Private_Dirty):\s+(\d+) kB/.exec(line);
    if (!isLayer || found === null) continue;
    const size = Number(found[2]) * 1024;
    if (found[1] === 'Rss') bytes.residentBytes += size;
    else if (found[1] === 'Shared_Clean') bytes.sharedBytes += size;
    else bytes.dirtyBytes += size;
  }
  return { files, ...bytes };
}
