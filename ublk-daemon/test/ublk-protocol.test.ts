/** Numbers and layouts of ublk that need no driver to be checked; what the driver makes of them is tested in the lab (*.lab.ts). */
import { expect, test } from 'vitest';
import { FEATURE, featureNames, UBLK_FEATURES } from '../target/ublk/features.ts';
import { CONTROL, DEV_INFO_BYTES, decodeDevInfo, encodeDevInfo, encodeParams, IO } from '../target/ublk/protocol.ts';
import { ublkSupport } from '../target/ublk/support.ts';

test('commands have the numbers of the kernel’s header', () => {
  const hex = (number: number) => (number >>> 0).toString(16);
  expect(hex(CONTROL.ADD_DEV)).toBe('c0207504');
  expect(hex(CONTROL.UPDATE_SIZE)).toBe('c0207515');
  expect(hex(CONTROL.GET_FEATURES)).toBe('80207513');
  expect(hex(IO.COMMIT_AND_FETCH)).toBe('c0107521');
});

test('each feature that is used is the bit of its name, and all that is needed is asked for', () => {
  expect(featureNames(BigInt(FEATURE.USER_RECOVERY))).toEqual(['user recovery']);
  expect(featureNames(BigInt(FEATURE.USER_RECOVERY_REISSUE))).toEqual(['reissue']);
  expect(featureNames(BigInt(FEATURE.UNPRIVILEGED))).toEqual(['unprivileged']);
  expect(featureNames(BigInt(FEATURE.CMD_IOCTL_ENCODE))).toEqual(['ioctl encoding']);
  expect(featureNames(BigInt(FEATURE.UPDATE_SIZE))).toEqual(['update size']);
  expect(UBLK_FEATURES.filter(({ use }) => use !== 'unused').map(({ name }) => name)).toEqual(
    featureNames(BigInt(Object.values(FEATURE).reduce((all, bit) => all | bit, 0))),
  );
  // Bits that are newer than the table.
  expect(featureNames(1n << 60n)).toEqual([]);
});

test('a device is asked for and told as struct ublksrv_ctrl_dev_info has it', () => {
  const bytes = Buffer.alloc(DEV_INFO_BYTES);
  encodeDevInfo(bytes, { id: 7, queues: 2, depth: 64, maxIoBytes: 2 ** 20, pid: 1234, flags: 0x58, mark: 0xfedcba98 });
  bytes.writeUInt16LE(2, 4);
  bytes.writeUInt32LE(1000, 40);
  bytes.writeUInt32LE(1001, 44);
  expect(decodeDevInfo(bytes)).toEqual({
    ...{ id: 7, state: 2, queues: 2, depth: 64, maxIoBytes: 2 ** 20, pid: 1234, flags: 0x58, mark: 0xfedcba98 },
    ...{ ownerUid: 1000, ownerGid: 1001 },
  });
  // Of another program.
  bytes.writeUInt32LE(0, 36);
  expect(decodeDevInfo(bytes).mark).toBeUndefined();
});

test('a device of more than 2 TiB keeps its size', () => {
  const bytes = Buffer.alloc(4096);
  encodeParams(bytes, { sizeBytes: 5 * 2 ** 40, blockSize: 4096, readOnly: true, maxIoBytes: 2 ** 20 });
  expect(bytes.readBigUInt64LE(24)).toBe((5n * 2n ** 40n) / 512n);
  expect(bytes.subarray(12, 16)).toEqual(Buffer.from([12, 12, 12, 12]));
});

test('support says why there is none, or what there is', async () => {
  const { obstacle, features } = await ublkSupport();
  if (obstacle === undefined) expect(features).toContain('user recovery');
  else expect(obstacle).toMatch(/./);
});
