/** Who gets a graphics processor when several pools want one: pure, with a clock of its own. */
import { describe, expect, it } from 'vitest';
import { type GpuLease, type GpuRequest, GpuScheduler } from '../fncall/gpu/gpu-scheduler.ts';
import type { Gpu } from '../fncall/gpu/nvidia-smi.ts';

const card = (index: number, memoryMib = 80_000): Gpu => ({
  uuid: `GPU-${index}`,
  name: 'card',
  index,
  profile: undefined,
  memoryMib,
});
const part = (index: number): Gpu => ({ ...card(index, 10_000), uuid: `MIG-${index}`, profile: '1g.10gb' });
const EXCLUSIVE: GpuRequest = { mode: 'exclusive' };
const SHARED: GpuRequest = { mode: 'shared' };
const TURN = 1_000;

class Site {
  time = 0;
  readonly given: string[] = [];
  readonly scheduler: GpuScheduler;
  private readonly owners = new Map<string, object>();

  constructor(gpus: readonly Gpu[], perGpu = 2) {
    this.scheduler = new GpuScheduler({ gpus, perGpu, turnMs: TURN, now: () => this.time });
  }

  /** Of a pool, by its name. */
  take(pool: string, request: GpuRequest, isUrgent: () => boolean = () => true): Promise<GpuLease> {
    const owner = this.owners.get(pool) ?? {};
    this.owners.set(pool, owner);
    const taken = this.scheduler.take(request, undefined, { owner, isUrgent });
    return taken.then((lease) => {
      this.given.push(`${pool} ${lease.gpu.uuid}`);
      return lease;
    });
  }

  /** What has been given so far, in order. */
  async told(): Promise<string[]> {
    await new Promise((resolve) => setImmediate(resolve));
    return this.given.splice(0);
  }
}

describe('graphics processors that several want', () => {
  it('come to one that wants a whole one, however many small ones come after it', async () => {
    const site = new Site([card(0)]);
    const small = await site.take('small', SHARED);
    const large = site.take('large', EXCLUSIVE);
    const later = Array.from({ length: 20 }, () => site.take('small', SHARED));
    expect(await site.told()).toEqual(['small GPU-0']);
    small.release();
    expect(await site.told()).toEqual(['large GPU-0']);
    (await large).release();
    expect(await site.told()).toEqual(['small GPU-0', 'small GPU-0']);
    for (const one of later) (await one).release();
  });

  it('are not kept from whoever can use what the one before cannot', async () => {
    const site = new Site([card(0), part(1), card(2, 20_000)]);
    const held = await site.take('a', { mode: 'exclusive', memoryMib: 40_000 });
    const waits = site.take('b', { mode: 'exclusive', memoryMib: 40_000 });
    await site.take('c', { mode: 'exclusive', profile: '1g.10gb' });
    await site.take('d', SHARED);
    await site.take('d', SHARED);
    expect(await site.told()).toEqual(['a GPU-0', 'c MIG-1', 'd GPU-2', 'd GPU-2']);
    held.release();
    expect((await waits).gpu.uuid).toBe('GPU-0');
  });

  it('are meant for one each: of several that would do, all but one go on being shared', async () => {
    const site = new Site([card(0), card(1)]);
    const [one, other] = [await site.take('small', SHARED), await site.take('small', SHARED)];
    const third = await site.take('small', SHARED);
    expect(await site.told()).toEqual(['small GPU-0', 'small GPU-0', 'small GPU-1']);
    const large = site.take('large', EXCLUSIVE);
    // The second card has fewer holders: it is kept for that one, and nobody joins there.
    const fourth = site.take('small', SHARED);
    expect(await site.told()).toEqual([]);
    // Both have one now. The first is kept, the second goes on.
    one.release();
    expect(await site.told()).toEqual(['small GPU-1']);
    other.release();
    expect(await site.told()).toEqual(['large GPU-0']);
    for (const lease of [third, await large, await fourth]) lease.release();
  });

  it('go to calls before containers that are made ahead of calls', async () => {
    const site = new Site([card(0)]);
    const held = await site.take('a', EXCLUSIVE);
    const ahead = site.take('floor', EXCLUSIVE, () => false);
    const call = site.take('call', EXCLUSIVE);
    expect(held.isWanted()).toBe(false);
    held.setInUse(false);
    expect(held.isWanted()).toBe(true);
    held.leave();
    expect(held.isWanted()).toBe(false);
    held.release();
    await site.told();
    const lease = await call;
    lease.setInUse(false);
    // Nobody waits for it now: it stays.
    expect(lease.isWanted()).toBe(false);
    lease.release();
    expect((await ahead).gpu.uuid).toBe('GPU-0');
  });

  it('are taken up when what waited becomes urgent', async () => {
    const site = new Site([card(0), card(1)], 1);
    const [a] = [await site.take('a', SHARED), await site.take('b', SHARED)];
    let urgent = false;
    const first = site.take('c', SHARED, () => false);
    const second = site.take('d', SHARED, () => urgent);
    a.setInUse(false);
    expect(a.isWanted()).toBe(false);
    urgent = true;
    site.scheduler.serve();
    expect(a.isWanted()).toBe(true);
    a.release();
    expect((await second).gpu.uuid).toBe('GPU-0');
    (await second).release();
    await first;
  });

  it('are asked back from one that nobody uses, as many as are wanted', async () => {
    const site = new Site([card(0), card(1), part(2)]);
    const leases = [await site.take('a', EXCLUSIVE), await site.take('a', EXCLUSIVE), await site.take('a', EXCLUSIVE)];
    expect(await site.told()).toEqual(['a MIG-2', 'a GPU-0', 'a GPU-1']);
    const wanted = site.take('b', { mode: 'exclusive', memoryMib: 40_000 });
    const [small, busy, idle] = leases as [GpuLease, GpuLease, GpuLease];
    small.setInUse(false);
    idle.setInUse(false);
    // What would be no use to it stays where it is, and so does what works while another one does not.
    expect([small, busy, idle].map((one) => one.isWanted())).toEqual([false, false, true]);
    idle.leave();
    expect([small, busy, idle].map((one) => one.isWanted())).toEqual([false, false, false]);
    idle.release();
    expect((await wanted).gpu.uuid).toBe('GPU-1');
  });

  it('are asked back from all that share one when somebody wants it alone, and from one when somebody would share it', async () => {
    const site = new Site([card(0)]);
    const leases = [await site.take('a', SHARED), await site.take('a', SHARED)];
    for (const lease of leases) lease.setInUse(false);
    const shares = site.take('b', SHARED);
    expect(leases.map((one) => one.isWanted())).toEqual([true, true]);
    leases[0]!.leave();
    expect(leases.map((one) => one.isWanted())).toEqual([false, false]);
    leases[0]!.release();
    const third = await shares;
    third.setInUse(false);
    const alone = site.take('c', EXCLUSIVE);
    expect([leases[1]!, third].map((one) => one.isWanted())).toEqual([true, true]);
    leases[1]!.leave();
    expect(third.isWanted()).toBe(true);
    leases[1]!.release();
    third.release();
    expect((await alone).gpu.uuid).toBe('GPU-0');
  });

  it('change hands when a turn is over, though calls of the pool that has one never end', async () => {
    const site = new Site([card(0)]);
    let lease = await site.take('a', EXCLUSIVE);
    const pools = ['a', 'b'];
    for (let turn = 1; turn <= 6; turn++) {
      const [has, waits] = [pools[(turn - 1) % 2]!, pools[turn % 2]!];
      const next = site.take(waits, EXCLUSIVE);
      // It wants another one for itself too: that one comes after.
      const stop = new AbortController();
      const more = site.scheduler.take(EXCLUSIVE, stop.signal, { owner: {}, isUrgent: () => false }).catch(() => {});
      // A start is no part of the turn, and a second call does not begin it anew.
      site.time += 2 * TURN;
      expect(lease.isWanted()).toBe(false);
      lease.setInUse(true);
      site.time += TURN - 1;
      lease.setInUse(true);
      expect(lease.isWanted()).toBe(false);
      site.time += 1;
      expect([has, lease.isWanted()]).toEqual([has, true]);
      lease.leave();
      lease.release();
      lease = await next;
      stop.abort(new Error('gone'));
      await more;
    }
    expect(await site.told()).toEqual(['a', 'b', 'a', 'b', 'a', 'b', 'a'].map((pool) => `${pool} GPU-0`));
  });

  it('go to whose pool has the fewest, and are not passed to and fro where that would change nothing', async () => {
    const site = new Site([card(0), card(1), card(2)]);
    const held = [await site.take('a', EXCLUSIVE), await site.take('a', EXCLUSIVE), await site.take('b', EXCLUSIVE)];
    const more = [site.take('a', EXCLUSIVE), site.take('b', EXCLUSIVE)];
    for (const one of held) one.setInUse(true);
    site.time += 10 * TURN;
    // Two and one: it would only be one and two then.
    expect(held.map((one) => one.isWanted())).toEqual([false, false, false]);
    const none = site.take('c', EXCLUSIVE);
    // Whichever is at the end of a call first: it would do, and then no other one is wanted.
    expect(held.map((one) => one.isWanted())).toEqual([true, true, true]);
    held[1]!.leave();
    expect(held.map((one) => one.isWanted())).toEqual([false, false, false]);
    await site.told();
    // The first that is free is for the pool that has none; then the other one has none.
    for (const lease of held) lease.release();
    expect((await site.told()).map((told) => told.split(' ')[0])).toEqual(['c', 'a', 'b']);
    for (const lease of [...more, none]) (await lease).release();
    expect(site.scheduler.state.map(({ tasks }) => tasks)).toEqual([0, 0, 0]);
  });

  it('come from whoever is at the end of a call first, though another call never ends', async () => {
    const site = new Site([card(0), card(1)]);
    const [long, short] = [await site.take('a', EXCLUSIVE), await site.take('a', EXCLUSIVE)];
    for (const one of [long, short]) one.setInUse(true);
    const waits = site.take('b', EXCLUSIVE);
    site.time += TURN;
    // Both are alike, so it is meant for the first one; that one asks nothing while its call goes on.
    expect(short.isWanted()).toBe(true);
    short.leave();
    // It is left for that one: the other one stays, now or at the end of its call.
    expect(long.isWanted()).toBe(false);
    short.release();
    expect((await waits).gpu.uuid).toBe('GPU-1');
    expect(long.isWanted()).toBe(false);
  });

  it('are left by one of those that share them for each that would share one, and by all only where one is meant for it alone', async () => {
    const site = new Site([card(0), card(1)]);
    const held = await Promise.all(Array.from({ length: 4 }, () => site.take('a', SHARED)));
    for (const one of held) one.setInUse(true);
    site.time += TURN;
    const shares = site.take('b', SHARED);
    expect(held.map((one) => one.isWanted())).toEqual([true, true, true, true]);
    held[3]!.leave();
    expect(held.map((one) => one.isWanted())).toEqual([false, false, false, false]);
    held[3]!.release();
    expect((await shares).gpu.uuid).toBe('GPU-1');
    site.scheduler.take(EXCLUSIVE, undefined, { owner: {}, isUrgent: () => true }).catch(() => {});
    // To leave the second one would be no use to it: another one stays there.
    expect(held.slice(0, 3).map((one) => one.isWanted())).toEqual([true, true, false]);
    held[0]!.leave();
    expect(held.slice(0, 3).map((one) => one.isWanted())).toEqual([false, true, false]);
  });

  it('are meant for whom until something changes: who asks again costs nothing', async () => {
    const cards = Array.from({ length: 32 }, (_, index) => card(index));
    const site = new Site(cards);
    const held = await Promise.all(cards.map(() => site.take('a', EXCLUSIVE)));
    for (const one of held) one.setInUse(false);
    let asked = 0;
    const isUrgent = () => {
      asked++;
      return true;
    };
    for (let i = 0; i < 200; i++) site.take('b', EXCLUSIVE, isUrgent);
    asked = 0;
    site.scheduler.serve();
    expect(held.filter((one) => one.isWanted()).length).toBe(32);
    // All of them for the plan, then each of those that one is meant for.
    expect(asked).toBe(200 + 32);
    asked = 0;
    held[0]!.leave();
    expect(held.filter((one) => one.isWanted()).length).toBe(31);
    expect(asked).toBe(200 + 31);
  });
});
