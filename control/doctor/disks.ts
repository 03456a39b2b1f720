/** How disks can be attached on this machine, and what takes the place of what is missing: ublk, then NBD, then a file behind a
 * loop device. */
import { existsSync } from 'node:fs';
import { type Feature, type ModuleState, moduleState } from '#linux';
import { ublkSupport } from '#ublk-daemon';

const WITHOUT_UBLK = 'NBD, for programs that speak it and /dev/nbdN; --way loop for a device without either';

export async function diskRows(): Promise<Feature[]> {
  const { obstacle, features } = await ublkSupport();
  const driver = moduleState('ublk_drv');
  const has = (name: string) => features.includes(name);
  const rest = features.length === 0 ? 'the driver could not be asked' : 'older than Linux 6.16';
  const client = moduleState('nbd');
  return [
    {
      name: 'ublk',
      present: obstacle === undefined,
      detail: obstacle === undefined ? features.join(', ') : withDriver(obstacle, driver),
      usedFor: 'dsec disk attach: disks as /dev/ublkbN, which outlive the block service',
      fallback: WITHOUT_UBLK,
    },
    {
      name: 'ublk unprivileged',
      present: has('unprivileged'),
      detail: has('unprivileged') ? 'with a udev rule: docs/ublk.md' : rest,
      usedFor: 'disks as devices of users that are not root; they end with their server',
      fallback: WITHOUT_UBLK,
    },
    {
      name: 'ublk update size',
      present: has('update size'),
      detail: has('update size') ? 'the driver has it' : rest,
      usedFor: 'an attached disk that is resized grows at once',
      fallback: 'it grows when it is attached again',
    },
    {
      name: 'NBD client of the kernel',
      present: existsSync('/dev/nbd0') || client === 'built in',
      detail: existsSync('/dev/nbd0') ? '/dev/nbd0' : moduleText('nbd', client),
      usedFor: 'disks over NBD as /dev/nbdN (nbd-client)',
      fallback: 'ublk; programs that speak NBD themselves; --way loop',
    },
    fileRow(),
  ];
}

function fileRow(): Feature {
  const missing = ['/dev/fuse', '/dev/loop-control'].filter((path) => !existsSync(path));
  return {
    name: 'FUSE and loop devices',
    present: missing.length === 0,
    detail: missing.length === 0 ? 'both are there' : `no ${missing.join(', ')}`,
    usedFor: 'dsec disk attach --way file, --way loop: disks as a file, and as /dev/loopN',
    fallback: 'ublk; NBD',
  };
}

function withDriver(obstacle: string, driver: ModuleState): string {
  return driver === 'loaded' || driver === 'built in' ? obstacle : moduleText('ublk_drv', driver);
}

function moduleText(name: string, state: ModuleState): string {
  if (state === 'not loaded') return `not loaded (modprobe ${name})`;
  return state === 'missing' ? 'not in this kernel' : state;
}
