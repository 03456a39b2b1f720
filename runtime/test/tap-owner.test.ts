/** A tap is removed by whose it is, not by its name: the name may be another sandbox's by then. */
import * as fs from 'node:fs';
import { afterEach, describe, expect, it } from 'vitest';
import { networkPool, sandboxAddresses } from '../network/address-pool.ts';
import {
  isTapOf,
  linksNamed,
  makeSandboxTap,
  removeSandboxLink,
  removeTapOf,
  sandboxLink,
  tapOwner,
} from '../network/sandbox-link.ts';

const can = process.getuid?.() === 0 && fs.existsSync('/dev/net/tun');
if (!can) console.log('skipped: not root, or no /dev/net/tun');

const RUN = '/run/of a test';

describe.skipIf(!can)('a tap', () => {
  /** High, where no sandbox of another test gets to. */
  const number = 30_000 + (process.pid % 10_000);
  const mine = sandboxAddresses(networkPool(), number);
  afterEach(() => removeSandboxLink(mine.link));
  /** As far as a process came that was killed then. */
  const halfMade = (id: string) =>
    makeSandboxTap(mine, tapOwner(RUN, id), () => {
      throw new Error('no program');
    }).catch(() => {});

  it('says whose it is before it is anything else', async () => {
    await halfMade('one');
    const [found] = linksNamed(mine.link);
    expect(found).toMatchObject({ name: mine.link, owner: tapOwner(RUN, 'one') });
    expect([isTapOf(RUN, found!.owner), isTapOf('/run/of', found!.owner), isTapOf('test', found!.owner)]).toEqual([
      true,
      false,
      false,
    ]);
  });

  it('of another sandbox, or of another node, with the same number stays', async () => {
    await halfMade('two');
    const before = sandboxLink(mine.link);
    expect(before).toBeDefined();
    removeTapOf(number, 'one', RUN);
    removeTapOf(number, 'two', '/run/elsewhere');
    expect(sandboxLink(mine.link)).toBe(before);
    removeTapOf(number, 'two', RUN);
    expect(sandboxLink(mine.link)).toBeUndefined();
    removeTapOf(number, 'two', RUN);
  });
});
