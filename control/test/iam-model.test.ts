/**
 * IAM against a model that says of each call, by brute force, what has to come of it: random trees, quotas, reservations, grants and
 * revocations, one after the other; then many at once with connections cut in between, after which the sums still have to be right.
 */
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import { ACTIONS, type Action, actionsOf, ROLES } from '../iam/actions.ts';
import { type Identity, RESOURCES, type Resource, type ResourceAmounts } from '../iam/iam.ts';
import { bootstrapAdmin, type OpenIam, openIam } from '../iam/open-iam.ts';
import { kinds, type TestDatabases } from './iam-databases.ts';

vi.setConfig({ testTimeout: 600_000, hookTimeout: 600_000 });

function randomOf(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

interface ModelPolicy {
  id: string;
  principal: string;
  project: string;
  actions: ReadonlySet<Action>;
  end: number;
}

interface ModelToken {
  id: string;
  secret: string;
  identity: Identity;
  principal: string;
  project: string;
  actions: ReadonlySet<Action>;
  end: number;
}

const below = (path: string, above: string) => `${path}/`.startsWith(`${above}/`);

/** What should be, kept as plainly as can be: sums are made anew each time they are asked for. */
class Model {
  readonly limits = new Map<string, Partial<Record<Resource, number>>>([['root', {}]]);
  readonly live = new Map<string, { project: string; amounts: ResourceAmounts }>();
  readonly policies = new Map<string, ModelPolicy>();
  readonly tokens = new Map<string, ModelToken>();
  readonly disabled = new Set<string>();

  used(project: string, resource: Resource): number {
    let sum = 0;
    for (const one of this.live.values()) if (below(one.project, project)) sum += one.amounts[resource];
    return sum;
  }

  /** Limits below that no other limit stands above. */
  handedDown(project: string, resource: Resource, changed?: readonly [string, number | undefined]): number {
    const limitOf = (path: string) => (changed?.[0] === path ? changed[1] : this.limits.get(path)?.[resource]);
    let sum = 0;
    for (const path of this.limits.keys()) {
      if (path === project || !below(path, project)) continue;
      const limit = limitOf(path);
      const between = [...this.limits.keys()].some(
        (other) =>
          other !== project &&
          other !== path &&
          below(other, project) &&
          below(path, other) &&
          limitOf(other) !== undefined,
      );
      if (limit !== undefined && !between) sum += limit;
    }
    return sum;
  }

  /** What is asked for nothing of is not refused, even where a limit was set below what is in use. */
  mayReserve(project: string, amounts: ResourceAmounts): boolean {
    return [...this.limits].every(
      ([path, limits]) =>
        !below(project, path) ||
        RESOURCES.every((r) => amounts[r] === 0 || this.used(path, r) + amounts[r] <= (limits[r] ?? Infinity)),
    );
  }

  /** Whether the sum of what is handed down fits everywhere, once `project` has this limit. */
  mayLimit(project: string, resource: Resource, limit: number | undefined): boolean {
    return [...this.limits.keys()].every((path) => {
      const own = path === project ? limit : this.limits.get(path)?.[resource];
      return this.handedDown(path, resource, [project, limit]) <= (own ?? Infinity);
    });
  }

  until(token: ModelToken, action: Action, project: string, now: number): number {
    if (this.disabled.has(token.principal) || !this.tokens.has(token.id) || token.end <= now) return 0;
    if (!token.actions.has(action) || !below(project, token.project)) return 0;
    const ends = [...this.policies.values()]
      .filter((policy) => policy.principal === token.principal && policy.end > now)
      .filter((policy) => policy.actions.has(action) && below(project, policy.project))
      .map((policy) => policy.end);
    return Math.min(token.end, Math.max(0, ...ends));
  }

  mayGive(token: ModelToken, actions: ReadonlySet<Action>, project: string, end: number | undefined, now: number) {
    return [...actions].every((action) => {
      const until = this.until(token, action, project, now);
      return until > now && (end === undefined || end <= until);
    });
  }
}

describe.each(kinds)('the model of IAM, on %s', (_kind, start) => {
  let databases: TestDatabases;
  beforeAll(() => {
    databases = start();
  });
  afterAll(() => databases?.stop());

  test.each([1, 2, 3])('every call has the outcome that the rules give it (seed %i)', async (seed) => {
    const random = randomOf(seed);
    const pick = <T>(values: Iterable<T>): T => {
      const all = [...values];
      return all[Math.floor(random() * all.length)] as T;
    };
    let now = 1_700_000_000_000;
    const iam = await openIam({ database: await databases.make(), now: () => now });
    const model = new Model();
    const outcomes = new Map<string, number>();
    /** Holds what happened against what had to. */
    const hold = async <T>(what: string, may: boolean, tried: Promise<T>): Promise<T | undefined> => {
      const result = await tried.then(
        (value) => ({ value }),
        (error) => ({ error }),
      );
      const done = 'value' in result;
      outcomes.set(`${what} ${done}`, (outcomes.get(`${what} ${done}`) ?? 0) + 1);
      if (done !== may)
        throw new Error(`${what}: ${done ? 'done' : result.error.message}, and it may ${may ? '' : 'not '}be`);
      return done ? result.value : undefined;
    };
    const admin = await iam.authenticate((await bootstrapAdmin(iam)) as string);
    const [adminPolicy] = await iam.listPolicies(admin);
    const all = new Set(ACTIONS);
    model.policies.set('admin', {
      id: adminPolicy?.id ?? '',
      principal: 'admin',
      project: 'root',
      actions: all,
      end: Infinity,
    });
    const adminToken = {
      id: admin.tokenId,
      secret: '',
      identity: admin,
      principal: 'admin',
      project: 'root',
      actions: all,
      end: Infinity,
    };
    model.tokens.set(admin.tokenId, adminToken);
    const names = ['ann', 'bob', 'cem'];
    for (const name of names) await iam.createPrincipal(admin, { name, kind: 'user', project: 'root' });

    const grantsOf = () => (random() < 0.5 ? [pick(Object.keys(ROLES))] : [pick(ACTIONS), pick(ACTIONS)]);
    const endOf = () => (random() < 0.5 ? undefined : now + 1 + Math.floor(random() * 200_000));
    const steps: Record<string, (by: ModelToken) => Promise<unknown>> = {
      project: async (by) => {
        const parent = pick(model.limits.keys());
        const path = `${parent}/${pick('abc')}`;
        const may = model.until(by, 'project.admin', parent, now) > now && !model.limits.has(path);
        if (await hold('project', may, iam.createProject(by.identity, path))) model.limits.set(path, {});
      },
      removeProject: async (by) => {
        const path = pick(model.limits.keys());
        const parent = path.slice(0, Math.max(0, path.lastIndexOf('/')));
        const empty =
          ![...model.limits.keys()].some((other) => other !== path && below(other, path)) &&
          ![...model.live.values()].some(({ project }) => project === path);
        const may = parent !== '' && empty && model.until(by, 'project.admin', parent, now) > now;
        await hold('removeProject', may, iam.removeProject(by.identity, path));
        if (!may) return;
        model.limits.delete(path);
        for (const [id, { project }] of model.policies) if (project === path) model.policies.delete(id);
        for (const [id, { project }] of model.tokens) if (project === path) model.tokens.delete(id);
      },
      quota: async (by) => {
        const project = pick(model.limits.keys());
        const parent = project.includes('/') ? project.slice(0, project.lastIndexOf('/')) : 'root';
        const resource = pick(RESOURCES);
        const limit = random() < 0.2 ? undefined : Math.floor(random() * 12);
        const may = model.until(by, 'quota.admin', parent, now) > now && model.mayLimit(project, resource, limit);
        await hold('quota', may, iam.setQuota(by.identity, project, { [resource]: limit ?? null }));
        if (may) model.limits.set(project, { ...model.limits.get(project), [resource]: limit });
      },
      reserve: async () => {
        const project = pick(model.limits.keys());
        const amount = () => Math.floor(random() * 6);
        const amounts = { sandboxes: 1, cpuMilli: amount(), memoryBytes: amount(), diskBytes: amount() };
        const may = model.mayReserve(project, amounts);
        const made = await hold('reserve', may, iam.reserve({ project, user: 'u', amounts }));
        if (made !== undefined) model.live.set(made.id, { project, amounts });
      },
      release: async () => {
        const id = pick(model.live.keys());
        if (id === undefined) return;
        await iam.release(id);
        model.live.delete(id);
      },
      policy: async (by) => {
        const principal = pick([...names, 'admin']);
        const project = pick(model.limits.keys());
        const grants = grantsOf();
        const end = endOf();
        const actions = actionsOf(grants);
        const may =
          model.until(by, 'policy.admin', project, now) > now && model.mayGive(by, actions, project, end, now);
        const asked = { principal, project, grants, expiresAtMs: end };
        const made = await hold('policy', may, iam.createPolicy(by.identity, asked));
        if (made === undefined) return;
        const policy = { id: made.id, principal, project, actions, end: made.expiresAtMs ?? Infinity };
        for (const action of actions) expect(policy.end).toBeLessThanOrEqual(model.until(by, action, project, now));
        model.policies.set(made.id, policy);
      },
      removePolicy: async (by) => {
        const [key, policy] = pick(model.policies);
        if (key === 'admin') return;
        const may = model.until(by, 'policy.admin', policy.project, now) > now;
        await hold('removePolicy', may, iam.removePolicy(by.identity, policy.id));
        if (may) model.policies.delete(key);
      },
      token: async (by) => {
        const principal = pick([...names, by.principal, by.principal]);
        const project = pick(model.limits.keys());
        const grants = grantsOf();
        const end = endOf();
        const actions = actionsOf(grants);
        const may =
          model.until(by, 'token.admin', project, now) > now &&
          (principal === by.principal || model.until(by, 'token.admin', 'root', now) > now) &&
          !model.disabled.has(principal) &&
          model.mayGive(by, actions, project, end, now);
        const asked = { principal, project, grants, expiresAtMs: end };
        const made = await hold('token', may, iam.createToken(by.identity, asked));
        if (made === undefined) return;
        const identity = await iam.authenticate(made.secret);
        const token = {
          id: made.id,
          secret: made.secret,
          identity,
          principal,
          project,
          actions,
          end: made.expiresAtMs ?? Infinity,
        };
        model.tokens.set(made.id, token);
        // Whatever the new one can do, who made it can do as well.
        for (const path of model.limits.keys()) {
          for (const action of ACTIONS) {
            expect(model.until(token, action, path, now)).toBeLessThanOrEqual(model.until(by, action, path, now));
          }
        }
      },
      revoke: async (by) => {
        const token = pick(model.tokens.values());
        if (token.id === admin.tokenId) return;
        const may =
          model.until(by, 'token.admin', token.project, now) > now || (token.principal === by.principal && isValid(by));
        await hold('revoke', may, iam.revokeToken(by.identity, token.id));
        if (may) model.tokens.delete(token.id);
      },
      disable: async (by) => {
        const name = pick(names);
        const disable = !model.disabled.has(name);
        const back = [...model.policies.values()].filter(({ principal, end }) => principal === name && end > now);
        const may =
          model.until(by, 'policy.admin', 'root', now) > now &&
          (disable || back.every(({ actions, project, end }) => model.mayGive(by, actions, project, end, now)));
        await hold('disable', may, iam.disablePrincipal(by.identity, name, disable));
        if (!may) return;
        if (disable) model.disabled.add(name);
        else model.disabled.delete(name);
      },
      authorize: async (by) => {
        const action = pick(ACTIONS);
        const project = pick(model.limits.keys());
        await hold(
          'authorize',
          model.until(by, action, project, now) > now,
          iam.authorize(by.identity, action, project),
        );
        const again = by.secret === '' ? Promise.resolve(by.identity) : iam.authenticate(by.secret);
        await hold('authenticate', isValid(by), again);
      },
      time: async () => {
        now += Math.floor(random() * 5000);
      },
    };
    const isValid = (token: ModelToken) =>
      model.tokens.has(token.id) && token.end > now && !model.disabled.has(token.principal);
    const known: ModelToken[] = [adminToken];
    for (let i = 0; i < 350; i++) {
      const by = random() < 0.4 ? adminToken : pick(known);
      await pick(Object.values(steps))(by);
      // Also those that are revoked by now.
      for (const token of model.tokens.values()) if (!known.includes(token)) known.push(token);
    }
    expect(await iam.doubts()).toEqual([]);
    for (const quota of await iam.listQuotas(admin)) {
      for (const resource of RESOURCES) {
        expect(quota.used[resource]).toBe(model.used(quota.project, resource));
        expect(quota.delegated[resource]).toBe(model.handedDown(quota.project, resource));
      }
    }
    // The walk has been everywhere.
    for (const what of ['project', 'quota', 'reserve', 'policy', 'token', 'authorize']) {
      for (const done of [true, false])
        expect([what, done, (outcomes.get(`${what} ${done}`) ?? 0) > 0]).toEqual([what, done, true]);
    }
    await iam.close();
  });

  test('many at once, from two sides, with connections cut: nothing above a limit, nothing lost', async () => {
    const random = randomOf(7);
    const pick = <T>(values: readonly T[]): T => values[Math.floor(random() * values.length)] as T;
    const database = await databases.make();
    const sides: OpenIam[] = [await openIam({ database }), await openIam({ database })];
    const [first] = sides as [OpenIam];
    const admin = await first.authenticate((await bootstrapAdmin(first)) as string);
    const paths = ['root/a', 'root/a/b', 'root/a/c', 'root/d', 'root/d/e', 'root/d/e/f'];
    for (const path of paths) await first.createProject(admin, path);
    await first.setQuota(admin, 'root', { sandboxes: 60, cpuMilli: 40_000 });
    await first.setQuota(admin, 'root/a', { sandboxes: 30 });
    const held: string[] = [];
    const codes = new Set<string>();
    const note = (error: { code?: string }) => void codes.add(String(error.code));
    let most = 0;
    const worker = async (iam: OpenIam) => {
      for (let i = 0; i < 40; i++) {
        const dice = random();
        try {
          if (dice < 0.5) {
            const amounts = { sandboxes: 1, cpuMilli: Math.floor(random() * 2000), memoryBytes: 1, diskBytes: 1 };
            const requestId = random() < 0.5 ? `r${Math.floor(random() * 200)}` : undefined;
            const { id, existing } = await iam.reserve({ project: pick(paths), user: 'u', requestId, amounts });
            if (existing) continue;
            held.push(id);
            await iam.asking(id, `e${i % 3}`);
            await iam.placed(id, `e${i % 3}`, `s-${id}`);
          } else if (dice < 0.8) {
            const id = held.splice(Math.floor(random() * held.length), 1)[0];
            if (id !== undefined) await iam.release(id);
          } else if (dice < 0.95) {
            await iam.setQuota(admin, pick(paths), { sandboxes: Math.floor(random() * 20) });
          } else {
            const { used } = await iam.getQuota(admin, 'root');
            most = Math.max(most, used.sandboxes, used.cpuMilli / 1000);
          }
        } catch (error) {
          note(error as { code?: string });
        }
      }
    };
    const workers = Array.from({ length: 16 }, (_, i) => worker(sides[i % 2] as OpenIam));
    let working = true;
    const done = Promise.all(workers).finally(() => {
      working = false;
    });
    if (databases.cut !== undefined) {
      while (working) {
        await databases.cut();
        await new Promise((resolve) => setTimeout(resolve, 100));
      }
    }
    await done;
    expect(most).toBeLessThanOrEqual(60);
    const expected = ['IAM_QUOTA', 'IAM_QUOTA_PARENT', 'IAM_QUOTA_DELEGATED', 'IAM_RESERVATION_GONE', 'IAM_DATABASE'];
    for (const code of codes) expect(expected).toContain(code);
    expect(codes).toContain('IAM_QUOTA');
    expect(await first.doubts()).toEqual([]);
    // What was answered for is there; what is left over of cut answers is ended by rosters and the sweep.
    const { used } = await first.getQuota(admin, 'root');
    if (databases.cut === undefined) expect(used.sandboxes).toBe(held.length);
    else expect(used.sandboxes).toBeGreaterThanOrEqual(held.length);
    for (const edge of ['e0', 'e1', 'e2']) {
      await first.reconcile(edge, { epoch: 1, writtenAtMs: Date.now() + 3_600_000, reservations: [] });
    }
    await first.sweep(-1000);
    const after = await first.getQuota(admin, 'root');
    expect(after.used).toEqual({ sandboxes: 0, cpuMilli: 0, memoryBytes: 0, diskBytes: 0 });
    for (const side of sides) await side.close();
  });
});
