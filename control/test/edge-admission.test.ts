/** An edge's last word: it promises no more than it has, and nothing under pressure. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { type AdmissionLimits, type AdmissionRequest, type Holding, refusal } from '../edge/admission.ts';
import { type Pressure, PressureGauge } from '../edge/pressure.ts';
import { NOTHING } from '../placement/amounts.ts';

const LIMITS: AdmissionLimits = {
  capacity: { cpuMilli: 4000, memoryBytes: 8000, diskBytes: 1000, gpus: 0 },
  sandboxes: new Map([['container', 3]]),
  memoryReserve: 0.1,
  diskReserve: 0.05,
  mostWaiting: { cpu: 0.8, memory: 0.2, io: 0.5 },
};
const CALM: Pressure = {
  cpuBusy: 0.5,
  memoryTotalBytes: 1000,
  memoryAvailableBytes: 500,
  diskTotalBytes: 1000,
  diskFreeBytes: 500,
  waiting: { cpu: 0, memory: 0, io: undefined },
};
const EMPTY: Holding = {
  reserved: NOTHING,
  sandboxes: new Map(),
  users: new Map(),
  heldBy: undefined,
  draining: false,
};
const ASKED: AdmissionRequest = {
  user: 'ann',
  backend: 'container',
  amounts: { cpuMilli: 1000, memoryBytes: 1000, diskBytes: 10, gpus: 0 },
  alone: false,
};

describe('a request', () => {
  it.each<[string, Partial<AdmissionRequest>, Partial<Holding>, Partial<Pressure>, string | undefined]>([
    ['is taken where there is room', {}, {}, {}, undefined],
    ['fills the node to the last', {}, { reserved: { ...NOTHING, memoryBytes: 7000 } }, {}, undefined],
    [
      'is refused beyond that',
      {},
      { reserved: { ...NOTHING, memoryBytes: 7001 } },
      {},
      'the node has promised what it has of memoryBytes',
    ],
    ['finds a node draining', {}, { draining: true }, {}, 'the node is draining'],
    ['wants what the node has not', { backend: 'vm' }, {}, {}, 'the node has no vm'],
    ['is one too many', {}, { sandboxes: new Map([['container', 3]]) }, {}, 'the node takes 3 of container'],
    ['comes to another user’s node', {}, { heldBy: 'bob' }, {}, 'the node is held by another user'],
    ['comes to its own node', { alone: true }, { heldBy: 'ann', users: new Map([['ann', 1]]) }, {}, undefined],
    [
      'wants to be alone',
      { alone: true },
      { users: new Map([['bob', 1]]) },
      {},
      'the node has sandboxes of other users',
    ],
    ['finds memory short', {}, {}, { memoryAvailableBytes: 99 }, '10 % of memory is left'],
    ['finds the disk full', {}, {}, { diskFreeBytes: 40 }, '4 % of the disk is left'],
    [
      'finds the node thrashing',
      {},
      {},
      { waiting: { cpu: 0.1, memory: 0.25, io: 0.1 } },
      'work waits for memory 25 % of the time',
    ],
  ])('%s', (_what, request, holding, pressure, expected) => {
    expect(refusal({ ...ASKED, ...request }, { ...EMPTY, ...holding }, { ...CALM, ...pressure }, LIMITS)).toBe(
      expected,
    );
  });
});

describe('pressure', () => {
  it('is read from the kernel’s own figures', () => {
    const procDir = mkdtempSync(join(tmpdir(), 'dsec-pressure-'));
    try {
      const times = (text: string) => writeFileSync(join(procDir, 'stat'), `cpu  ${text}\ncpu0 1 2 3 4\n`);
      writeFileSync(join(procDir, 'meminfo'), 'MemTotal:       2000 kB\nMemFree: 1 kB\nMemAvailable:    500 kB\n');
      mkdirSync(join(procDir, 'pressure'));
      writeFileSync(
        join(procDir, 'pressure/memory'),
        'some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=1.00\n',
      );
      const gauge = new PressureGauge({ stateDir: procDir, procDir });
      times('10 0 10 70 10 0 0 0 99 0');
      expect(gauge.measure()).toMatchObject({
        cpuBusy: 0.2,
        memoryTotalBytes: 2_048_000,
        memoryAvailableBytes: 512_000,
        waiting: { cpu: undefined, memory: 0.125, io: undefined },
      });
      times('40 0 40 110 10 0 0 0 999 0');
      expect(gauge.measure().cpuBusy).toBe(0.6);
    } finally {
      rmSync(procDir, { recursive: true });
    }
  });

  it('of this machine is a share', () => {
    const { cpuBusy, memoryAvailableBytes, memoryTotalBytes, diskFreeBytes, diskTotalBytes } = new PressureGauge({
      stateDir: tmpdir(),
    }).measure();
    for (const share of [cpuBusy, memoryAvailableBytes / memoryTotalBytes, diskFreeBytes / diskTotalBytes]) {
      expect(share).toBeGreaterThanOrEqual(0);
      expect(share).toBeLessThanOrEqual(1);
    }
  });
});
