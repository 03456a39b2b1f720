/** IAM, rule by rule, on both databases. */
import { readFileSync, statSync } from 'node:fs';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test, vi } from 'vitest';
import { ACTIONS } from '../iam/actions.ts';
import { openPostgres } from '../iam/database/postgres.ts';
import { openSqlite } from '../iam/database/sqlite.ts';
import { CACHE_MS, type Identity, type ResourceAmounts } from '../iam/iam.ts';
import { bootstrapAdmin, type OpenIam, openIam } from '../iam/open-iam.ts';
import { isTokenText, makeToken, tokenHash } from '../iam/token-text.ts';
import { kinds, type TestDatabases } from './iam-databases.ts';

/** The clock is a variable here; only the machine's load is left to wait for. */
vi.setConfig({ testTimeout: 600_000, hookTimeout: 600_000 });

const ONE: ResourceAmounts = { sandboxes: 1, cpuMilli: 500, memoryBytes: 512 << 20, diskBytes: 2 ** 31 };

describe.each(kinds)('IAM on %s', (kind, start) => {
  let databases: TestDatabases;
  let name: string;
  let iam: OpenIam;
  let admin: Identity;
  let secret: string;
  let clock = 0;

  beforeAll(() => {
    databases = start();
  });
  afterAll(() => databases?.stop());
  beforeEach(async () => {
    clock = 1_700_000_000_000;
    name = await databases.make();
    iam = await openIam({ database: name, now: () => clock, clockSkewMs: 0, askingGraceMs: 1000 });
    secret = (await bootstrapAdmin(iam)) as string;
    admin = await iam.authenticate(secret);
  });
  afterEach(async () => {
    const doubts = await iam.doubts();
    await iam.close();
    expect(doubts).toEqual([]);
  });

  /** A principal with a policy and a token, both on `project`. */
  async function member(name: string, project: string, grants: string[], expiresAtMs?: number) {
    await iam.createPrincipal(admin, { name, kind: 'user', project });
    const policy = await iam.createPolicy(admin, { principal: name, project, grants, expiresAtMs });
    const token = await iam.createToken(admin, { principal: name, project, grants, expiresAtMs });
    return { policy, token, identity: await iam.authenticate(token.secret) };
  }

  test('the first admin token is made once, and again only when asked for', async () => {
    expect(isTokenText(secret)).toBe(true);
    expect(await bootstrapAdmin(iam)).toBeUndefined();
    const again = await bootstrapAdmin(iam, { anew: true });
    expect((await iam.authenticate(again as string)).principal).toBe('admin');
    await iam.authorize(admin, 'policy.admin', 'root/any/where');
  });

  test('a hundred forged, expired, revoked, foreign and malformed tokens are refused with one answer', async () => {
    await iam.createProject(admin, 'root/a');
    const { token, identity } = await member('ann', 'root/a', ['developer', 'token.admin'], clock + 60_000);
    const revoked = await iam.createToken(admin, {});
    await iam.revokeToken(admin, revoked.id);
    await iam.createPrincipal(admin, { name: 'gone', kind: 'agent', project: 'root' });
    const disabled = await iam.createToken(admin, { principal: 'gone', grants: ['reader'] });
    await iam.disablePrincipal(admin, 'gone', true);
    const soon = await iam.createToken(admin, { expiresAtMs: clock + 10 });
    expect((await iam.authenticate(soon.secret)).tokenId).toBe(soon.id);
    clock += 10;
    const changed = (text: string, at: number) =>
      text.slice(0, at) + (text[at] === 'A' ? 'B' : 'A') + text.slice(at + 1);
    const bad = [
      revoked.secret,
      disabled.secret,
      soon.secret,
      tokenHash(secret),
      admin.tokenId,
      '',
      'dsec_',
      ` ${secret}`,
      `${secret}=`,
      secret.toUpperCase(),
      secret.slice(0, -1),
      secret.replace('dsec_', 'ghp__'),
      "' OR 1=1 --",
      'dsec_\u0000'.padEnd(54, 'x'),
      'x'.repeat(1_000_000),
      ...Array.from({ length: 50 }, (_, i) => changed(secret, 5 + (i % 49))),
      ...Array.from({ length: 40 }, () => makeToken()),
    ];
    expect(bad.length).toBeGreaterThan(100);
    const answers = new Set<string>();
    for (const text of bad) {
      const error = await iam.authenticate(text).then(
        () => undefined,
        (thrown) => thrown,
      );
      answers.add(JSON.stringify({ ...error, message: error?.message, code: error?.code }));
    }
    expect(answers.size).toBe(1);
    expect([...answers][0]).toContain('IAM_TOKEN_INVALID');
    expect((await iam.authenticate(token.secret)).principal).toBe('ann');
    clock += 60_000;
    await expect(iam.authenticate(token.secret)).rejects.toMatchObject({ code: 'IAM_TOKEN_INVALID', http: 401 });
    await expect(iam.authorize(identity, 'sandbox.read', 'root/a')).rejects.toMatchObject({
      code: 'IAM_TOKEN_INVALID',
    });
  });

  test('a malformed token is refused without a question to the database', async () => {
    const other = await openIam({ database: name });
    await other.close();
    await expect(other.authenticate('dsec_nonsense')).rejects.toMatchObject({ code: 'IAM_TOKEN_INVALID' });
    await expect(other.authenticate(makeToken())).rejects.not.toMatchObject({ code: 'IAM_TOKEN_INVALID' });
  });

  test('a token is never kept, in the database or the audit log', async () => {
    const holds = { code: 'IAM_BAD_REQUEST', message: expect.not.stringContaining(secret.slice(5, 48)) };
    await expect(iam.createToken(admin, { note: `for ${secret}` })).rejects.toMatchObject(holds);
    await expect(iam.createProject(admin, `root/${secret}`)).rejects.toMatchObject(holds);
    await expect(iam.createToken(admin, { grants: [secret] })).rejects.toMatchObject(holds);
    await expect(iam.createToken(admin, { principal: secret })).rejects.toMatchObject(holds);
    await expect(iam.createPrincipal(admin, { name: secret, kind: 'user', project: 'root' })).rejects.toMatchObject(
      holds,
    );
    await expect(iam.reserve({ project: 'root', user: secret, amounts: ONE })).rejects.toMatchObject(holds);
    const made = await iam.createToken(admin, { note: 'for tests' });
    await iam.audit({
      principal: 'admin',
      action: 'x',
      project: 'root',
      target: made.secret,
      outcome: 'done',
      detail: { text: `Bearer ${secret}` },
    });
    const records = JSON.stringify(await iam.readAudit(admin, { project: 'root' }));
    const lists = JSON.stringify([
      await iam.listTokens(admin),
      await iam.whoAmI(admin),
      await iam.listPrincipals(admin),
    ]);
    for (const text of [secret, made.secret]) {
      expect(records).not.toContain(text.slice(5, 48));
      expect(lists).not.toContain(text.slice(5, 48));
    }
    if (kind === 'sqlite') {
      for (const file of [name, `${name}-wal`]) {
        const bytes = readFileSync(file);
        expect(bytes.includes(made.secret.slice(5, 48))).toBe(false);
        expect(bytes.includes(secret.slice(5, 48))).toBe(false);
      }
      expect(statSync(name).mode & 0o777).toBe(0o600);
    }
  });

  test('a policy holds on its project and below it, as far as the token reaches, until it ends', async () => {
    for (const path of ['root/a', 'root/a/b', 'root/ab']) await iam.createProject(admin, path);
    const { identity, policy } = await member('ann', 'root/a', ['developer'], clock + 5000);
    await iam.authorize(identity, 'sandbox.create', 'root/a');
    await iam.authorize(identity, 'sandbox.create', 'root/a/b/c');
    for (const project of ['root', 'root/ab', 'root/b', '', 'root/a/../b']) {
      const tried = iam.authorize(identity, 'sandbox.create', project);
      if (project === 'root/a/../b') await tried;
      else await expect(tried).rejects.toMatchObject({ code: 'IAM_DENIED', http: 403 });
    }
    await expect(iam.authorize(identity, 'node.drain', 'root/a')).rejects.toMatchObject({ code: 'IAM_DENIED' });
    const may = await iam.scope(identity, 'sandbox.read');
    expect([may('root/a'), may('root/a/x'), may('root/ab'), may('root')]).toEqual([true, true, false, false]);
    // A token that allows more than the policies does not help.
    const wide = await iam.createToken(admin, { principal: 'ann' });
    await expect(iam.authorize(await iam.authenticate(wide.secret), 'node.drain', 'root/a')).rejects.toMatchObject({
      code: 'IAM_DENIED',
    });
    await iam.removePolicy(admin, policy.id);
    await expect(iam.authorize(identity, 'sandbox.create', 'root/a')).rejects.toMatchObject({ code: 'IAM_DENIED' });
  });

  test('what is revoked or disabled is refused here at once, and elsewhere within the bound of the cache', async () => {
    const other = await openIam({ database: name, now: () => clock });
    const made = await iam.createToken(admin, {});
    await iam.createPrincipal(admin, { name: 'bot', kind: 'agent', project: 'root' });
    const bot = await iam.createToken(admin, { principal: 'bot' });
    for (const each of [iam, other]) {
      await each.authenticate(made.secret);
      await each.authenticate(bot.secret);
    }
    await iam.revokeToken(admin, made.id);
    await iam.disablePrincipal(admin, 'bot', true);
    for (const { secret } of [made, bot]) {
      await expect(iam.authenticate(secret)).rejects.toMatchObject({ code: 'IAM_TOKEN_INVALID' });
    }
    clock += CACHE_MS;
    for (const { secret } of [made, bot]) {
      await expect(other.authenticate(secret)).rejects.toMatchObject({ code: 'IAM_TOKEN_INVALID' });
    }
    await iam.disablePrincipal(admin, 'bot', false);
    expect((await iam.authenticate(bot.secret)).kind).toBe('agent');
    await other.close();
  });

  test('nobody gives what he does not have: not in actions, not in projects, not in time', async () => {
    for (const path of ['root/a', 'root/a/b', 'root/c']) await iam.createProject(admin, path);
    const until = clock + 10_000;
    const { identity: lead } = await member('lead', 'root/a', ['developer', 'policy.admin', 'token.admin'], until);
    await iam.createPrincipal(admin, { name: 'bob', kind: 'user', project: 'root/a' });
    const give = (project: string, grants: string[], expiresAtMs?: number) =>
      iam.createPolicy(lead, { principal: 'bob', project, grants, expiresAtMs });
    const make = (project: string, grants: string[] | undefined, expiresAtMs?: number, principal = 'bob') =>
      iam.createToken(lead, { principal, project, grants, expiresAtMs });
    const beyond = { code: 'IAM_BEYOND', http: 403 };
    await expect(give('root/a', ['admin'])).rejects.toMatchObject(beyond);
    await expect(give('root/a', ['sandbox.read', 'quota.admin'])).rejects.toMatchObject(beyond);
    await expect(give('root/a/b', ['reader'], until + 1)).rejects.toMatchObject(beyond);
    await expect(give('root', ['reader'])).rejects.toMatchObject({ code: 'IAM_DENIED' });
    await expect(give('root/c', ['reader'])).rejects.toMatchObject({ code: 'IAM_DENIED' });
    await expect(make('root/a', ['node.drain'])).rejects.toMatchObject(beyond);
    await expect(make('root/a', ['reader'], until + 1)).rejects.toMatchObject(beyond);
    await expect(make('root', ['reader'])).rejects.toMatchObject({ code: 'IAM_DENIED' });
    // For somebody of another project, who may have more.
    await expect(make('root/a', ['reader'], undefined, 'admin')).rejects.toMatchObject({ code: 'IAM_DENIED' });
    expect((await give('root/a/b', ['reader'])).expiresAtMs).toBe(until);
    const token = await make('root/a/b', undefined);
    expect(token.expiresAtMs).toBe(until);
    expect(token.actions).not.toContain('quota.admin');
    // Enabling gives again what a principal had.
    await iam.createPolicy(admin, { principal: 'bob', project: 'root/c', grants: ['admin'] });
    await iam.disablePrincipal(lead, 'bob', true);
    await expect(iam.disablePrincipal(lead, 'bob', false)).rejects.toMatchObject(beyond);
    await iam.disablePrincipal(admin, 'bob', false);
    const denied = await iam.readAudit(admin, { project: 'root', principal: 'lead' });
    expect(denied.filter(({ outcome }) => outcome === 'denied').length).toBe(10);
  });

  test('a short token cannot be made a long one', async () => {
    const short = await iam.createToken(admin, { expiresAtMs: clock + 1000 });
    const thief = await iam.authenticate(short.secret);
    expect((await iam.createToken(thief, {})).expiresAtMs).toBe(clock + 1000);
    await iam.createPrincipal(thief, { name: 'mole', kind: 'user', project: 'root' });
    const grant = await iam.createPolicy(thief, { principal: 'mole', project: 'root', grants: ['admin'] });
    expect(grant.expiresAtMs).toBe(clock + 1000);
  });

  test('the last admin stays', async () => {
    const [policy] = await iam.listPolicies(admin);
    const last = { code: 'IAM_LAST_ADMIN', http: 409 };
    await expect(iam.removePolicy(admin, policy?.id ?? '')).rejects.toMatchObject(last);
    await expect(iam.disablePrincipal(admin, 'admin', true)).rejects.toMatchObject(last);
    await member('second', 'root', ['admin']);
    await iam.removePolicy(admin, policy?.id ?? '');
    await expect(iam.createProject(admin, 'root/x')).rejects.toMatchObject({ code: 'IAM_DENIED' });
  });

  test('quotas are handed down, never beyond the parent, and across projects without a limit', async () => {
    for (const path of ['root/a', 'root/a/b', 'root/a/b/c', 'root/a/b/d', 'root/a/e'])
      await iam.createProject(admin, path);
    const set = (project: string, sandboxes: number | null) => iam.setQuota(admin, project, { sandboxes });
    expect((await set('root/a', 10)).limits).toEqual({ sandboxes: 10 });
    await set('root/a/b/c', 6);
    // root/a/b has none of its own: what it hands down counts for root/a.
    await expect(set('root/a/e', 5)).rejects.toMatchObject({
      code: 'IAM_QUOTA_PARENT',
      params: { project: 'root/a', delegated: 11, limit: 10 },
    });
    await set('root/a/e', 4);
    await expect(set('root/a/b', 5)).rejects.toMatchObject({ code: 'IAM_QUOTA_DELEGATED' });
    await expect(set('root/a/b', 7)).rejects.toMatchObject({ code: 'IAM_QUOTA_PARENT' });
    await set('root/a/b', 6);
    await expect(set('root/a/b/d', 1)).rejects.toMatchObject({
      code: 'IAM_QUOTA_PARENT',
      params: { project: 'root/a/b' },
    });
    await expect(set('root/a', 9)).rejects.toMatchObject({ code: 'IAM_QUOTA_DELEGATED' });
    await set('root/a/b', null);
    await set('root/a/b/c', 2);
    expect((await iam.getQuota(admin, 'root/a')).delegated.sandboxes).toBe(6);
    await iam.removeProject(admin, 'root/a/e');
    expect((await iam.getQuota(admin, 'root/a')).delegated.sandboxes).toBe(2);
    expect((await iam.getQuota(admin, 'root')).delegated.sandboxes).toBe(10);
    for (const bad of [-1, 1.5, Number.NaN, 2 ** 53]) {
      await expect(set('root/a', bad)).rejects.toMatchObject({ code: 'IAM_BAD_REQUEST' });
    }
  });

  test('who was given a quota cannot raise it', async () => {
    for (const path of ['root/a', 'root/a/b']) await iam.createProject(admin, path);
    const { identity } = await member('lead', 'root/a', ['admin']);
    await iam.setQuota(identity, 'root/a/b', { sandboxes: 5 });
    await expect(iam.setQuota(identity, 'root/a', { sandboxes: 500 })).rejects.toMatchObject({ code: 'IAM_DENIED' });
    await expect(iam.removeProject(identity, 'root/a')).rejects.toMatchObject({ code: 'IAM_DENIED' });
  });

  test('a reservation counts all the way up, or not at all', async () => {
    for (const path of ['root/a', 'root/a/b', 'root/c']) await iam.createProject(admin, path);
    await iam.setQuota(admin, 'root', { sandboxes: 10 });
    await iam.setQuota(admin, 'root/a', { cpuMilli: 1000 });
    const asks = Array.from({ length: 40 }, (_, i) =>
      iam.reserve({ project: i % 2 === 0 ? 'root/a/b' : 'root/c', user: 'u', amounts: ONE }).then(
        ({ id }) => id,
        (error) => error.params,
      ),
    );
    const results = await Promise.all(asks);
    const ids = results.filter((result): result is string => typeof result === 'string');
    expect(ids.length).toBe(10);
    const refused = results.filter((result) => typeof result !== 'string');
    expect(new Set(refused.map(({ project, resource }) => `${project} ${resource}`))).toEqual(
      new Set(['root sandboxes', 'root/a cpuMilli']),
    );
    const used = async (project: string) => (await iam.getQuota(admin, project)).used;
    expect(await used('root')).toMatchObject({ sandboxes: 10, cpuMilli: 5000 });
    expect(await used('root/a')).toEqual(await used('root/a/b'));
    expect((await used('root/a')).sandboxes).toBe(2);
    await Promise.all([...ids, ...ids].map((id) => iam.release(id)));
    await iam.release('never was');
    expect(await used('root')).toEqual({ sandboxes: 0, cpuMilli: 0, memoryBytes: 0, diskBytes: 0 });
    const refusal = iam.reserve({ project: 'root/none', user: 'u', amounts: ONE });
    await expect(refusal).rejects.toMatchObject({ code: 'IAM_NOT_FOUND' });
  });

  test('sums stay exact where there is no limit', async () => {
    const most = { ...ONE, memoryBytes: Number.MAX_SAFE_INTEGER };
    const { id } = await iam.reserve({ project: 'root', user: 'u', amounts: most });
    const more = iam.reserve({ project: 'root', user: 'u', amounts: ONE });
    await expect(more).rejects.toMatchObject({ code: 'IAM_QUOTA', params: { resource: 'memoryBytes' } });
    expect((await iam.getQuota(admin, 'root')).used.memoryBytes).toBe(Number.MAX_SAFE_INTEGER);
    await iam.release(id);
  });

  test('one request id is one reservation', async () => {
    const ask = () => iam.reserve({ project: 'root', user: 'u', requestId: 'r1', amounts: ONE });
    const all = await Promise.all([ask(), ask(), ask()]);
    expect(new Set(all.map(({ id }) => id)).size).toBe(1);
    expect(all.filter(({ existing }) => !existing).length).toBe(1);
    const { id } = all[0];
    await iam.asking(id, 'e1');
    expect(await ask()).toEqual({
      id,
      project: 'root',
      state: 'pending',
      edge: 'e1',
      sandbox: undefined,
      existing: true,
    });
    await iam.placed(id, 'e1', 's1');
    await iam.placed(id, 'e1', 's1');
    expect(await ask()).toMatchObject({ id, state: 'placed', edge: 'e1', sandbox: 's1' });
    const gone = { code: 'IAM_RESERVATION_GONE' };
    await expect(iam.placed(id, 'e1', 's2')).rejects.toMatchObject(gone);
    await expect(iam.placed(id, 'e2', 's1')).rejects.toMatchObject(gone);
    await expect(iam.asking(id, 'e2')).rejects.toMatchObject(gone);
    await iam.release(id);
    await expect(iam.placed(id, 'e1', 's1')).rejects.toMatchObject(gone);
    // It is remembered what it was, and it counts for nobody.
    const ended = { id, state: 'ended', edge: 'e1', sandbox: 's1', existing: true };
    expect(await ask()).toMatchObject(ended);
    expect(await iam.doubts()).toEqual([]);
    clock += 3_500_000;
    await iam.sweep();
    expect(await ask()).toMatchObject(ended);
    clock += 200_000;
    await iam.sweep();
    const next = await ask();
    expect(next).toMatchObject({ state: 'pending', existing: false });
    // What was never placed is made anew.
    await iam.release(next.id);
    const last = await ask();
    expect(last.existing).toBe(false);
    await iam.release(last.id);
  });

  test('an edge that is chosen already is on record with the reservation', async () => {
    const made = await iam.reserve({ project: 'root', user: 'u', requestId: 'chosen', amounts: ONE, edge: 'e9' });
    expect(made).toMatchObject({ state: 'pending', edge: 'e9', existing: false });
    await iam.placed(made.id, 'e9', 's9');
    const again = await iam.reserve({ project: 'root', user: 'u', requestId: 'chosen', amounts: ONE, edge: 'e8' });
    expect(again).toMatchObject({ id: made.id, state: 'placed', edge: 'e9', sandbox: 's9' });
    expect(await iam.reconcile('e9', { epoch: 'x', writtenAtMs: clock + 100_000, reservations: [] })).toEqual([
      made.id,
    ]);
    expect(await iam.reserve({ project: 'root', user: 'u', requestId: 'chosen', amounts: ONE })).toMatchObject({
      id: made.id,
      state: 'ended',
    });
  });

  test('a reservation takes other amounts, as far as the chain has room', async () => {
    await iam.createProject(admin, 'root/resized');
    await iam.setQuota(admin, 'root/resized', { memoryBytes: 100 });
    const amounts = { sandboxes: 1, cpuMilli: 10, memoryBytes: 60, diskBytes: 5 };
    const { id } = await iam.reserve({ project: 'root/resized', user: 'u', amounts });
    await expect(iam.resize(id, { ...amounts, memoryBytes: 101 })).rejects.toMatchObject({ code: 'IAM_QUOTA' });
    await iam.resize(id, { ...amounts, memoryBytes: 100, cpuMilli: 5 });
    expect((await iam.getQuota(admin, 'root/resized')).used).toEqual({ ...amounts, memoryBytes: 100, cpuMilli: 5 });
    await Promise.all([
      iam.resize(id, { ...amounts, memoryBytes: 80 }),
      iam.resize(id, { ...amounts, memoryBytes: 90 }),
    ]);
    expect((await iam.getQuota(admin, 'root/resized')).used.memoryBytes).toBe(90);
    // What is not named stays; what is in use already counts above the limit too.
    await iam.resize(id, { cpuMilli: 7 });
    expect((await iam.getQuota(admin, 'root/resized')).used).toEqual({ ...amounts, memoryBytes: 90, cpuMilli: 7 });
    await iam.resize(id, { memoryBytes: 120 }, true);
    expect((await iam.getQuota(admin, 'root/resized')).used.memoryBytes).toBe(120);
    await expect(iam.resize(id, { memoryBytes: 121 })).rejects.toMatchObject({ code: 'IAM_QUOTA' });
    await iam.release(id);
    expect((await iam.getQuota(admin, 'root/resized')).used.memoryBytes).toBe(0);
    await expect(iam.resize(id, amounts)).rejects.toMatchObject({ code: 'IAM_RESERVATION_GONE' });
    expect(await iam.doubts()).toEqual([]);
  });

  test('one bad value among many fails alone', async () => {
    const asks = ['a', '\u0000', 'b', '\ud800', 'c'.repeat(257)].map((user) =>
      iam.reserve({ project: 'root', user, amounts: ONE }).then(
        () => 'done',
        (error) => error.code,
      ),
    );
    expect(await Promise.all(asks)).toEqual(['done', 'IAM_BAD_REQUEST', 'done', 'IAM_BAD_REQUEST', 'IAM_BAD_REQUEST']);
    await iam.audit({
      principal: 'a\u0000\ud800',
      action: 'x',
      project: 'root',
      outcome: 'done',
      detail: { a: '\u0000' },
    });
    const [record] = await iam.readAudit(admin, { project: 'root' });
    expect(record).toMatchObject({ principal: 'a??', detail: { a: '\u0000' } });
  });

  test('a roster ends what it does not hold, if it was written later', async () => {
    const make = async (edge: string, sandbox?: string) => {
      const { id } = await iam.reserve({ project: 'root', user: 'u', amounts: ONE });
      await iam.asking(id, edge);
      if (sandbox !== undefined) await iam.placed(id, edge, sandbox);
      return id;
    };
    const kept = await make('e1', 's1');
    const ended = await make('e1', 's2');
    const asked = await make('e1');
    const elsewhere = await make('e2', 's3');
    const roster = (writtenAtMs: number) => ({ epoch: 'x', writtenAtMs, reservations: [kept, 'stranger'] });
    expect(await iam.reconcile('e1', roster(clock))).toEqual([]);
    const fresh = clock;
    clock += 500;
    const later = await make('e1', 's4');
    // What was recorded after it was written is not known to it; a create may still be on its way.
    expect(await iam.reconcile('e1', roster(fresh + 1))).toEqual([ended]);
    expect((await iam.reconcile('e1', roster(fresh + 1001))).sort()).toEqual([asked, later].sort());
    expect(await iam.uncounted('e1', [kept, 'stranger', elsewhere])).toEqual(['stranger', elsewhere]);
    expect((await iam.getQuota(admin, 'root')).used.sandboxes).toBe(2);
  });

  test('a reservation that nobody asks for is swept', async () => {
    const { id } = await iam.reserve({ project: 'root', user: 'u', amounts: ONE });
    const { id: asked } = await iam.reserve({ project: 'root', user: 'u', amounts: ONE });
    await iam.asking(asked, 'e1');
    clock += 599_999;
    const { id: young } = await iam.reserve({ project: 'root', user: 'u', amounts: ONE });
    expect(await iam.sweep()).toBe(0);
    clock += 2;
    expect(await iam.sweep()).toBe(1);
    await expect(iam.asking(id, 'e1')).rejects.toMatchObject({ code: 'IAM_RESERVATION_GONE' });
    await iam.asking(young, 'e1');
    clock += 1_000_000;
    expect(await iam.sweep()).toBe(0);
  });

  test('projects: any depth, checked names, removed when empty, and nothing comes back with a name', async () => {
    let path = 'root';
    for (let depth = 0; depth < 60; depth++) {
      path += `/p${depth}`;
      await iam.createProject(admin, path);
    }
    const { id } = await iam.reserve({ project: path, user: 'u', amounts: ONE });
    expect((await iam.getQuota(admin, 'root/p0')).used.sandboxes).toBe(1);
    await expect(iam.removeProject(admin, path)).rejects.toMatchObject({ code: 'IAM_NOT_EMPTY' });
    await iam.release(id);
    await expect(iam.removeProject(admin, 'root/p0')).rejects.toMatchObject({ code: 'IAM_NOT_EMPTY' });
    for (const bad of [
      '',
      'a',
      'root/',
      'root//a',
      'root/A',
      'root/..',
      'root/a b',
      `root/${'x'.repeat(64)}`,
      '/root',
    ]) {
      await expect(iam.createProject(admin, bad)).rejects.toMatchObject({ code: 'IAM_BAD_REQUEST' });
    }
    await expect(iam.createProject(admin, 'root/x/y')).rejects.toMatchObject({ code: 'IAM_NOT_FOUND' });
    await iam.createProject(admin, 'root/t');
    await expect(iam.createProject(admin, 'root/t')).rejects.toMatchObject({ code: 'IAM_EXISTS' });
    const { token } = await member('ann', 'root/t', ['developer']);
    await expect(iam.removeProject(admin, 'root/t')).rejects.toMatchObject({ code: 'IAM_NOT_EMPTY' });
    await iam.disablePrincipal(admin, 'ann', true);
    await iam.removeProject(admin, 'root/t');
    await iam.createProject(admin, 'root/t');
    await iam.disablePrincipal(admin, 'ann', false);
    await expect(iam.authenticate(token.secret)).rejects.toMatchObject({ code: 'IAM_TOKEN_INVALID' });
    expect(await iam.listPolicies(admin, { principal: 'ann' })).toEqual([]);
  });

  test('lists show what the caller may see', async () => {
    for (const path of ['root/a', 'root/a/b', 'root/c']) await iam.createProject(admin, path);
    const { identity } = await member('ann', 'root/a', ['reader']);
    await member('cem', 'root/c', ['reader']);
    expect((await iam.listProjects(identity)).map(({ path }) => path)).toEqual(['root/a', 'root/a/b']);
    expect((await iam.listQuotas(identity)).map(({ project }) => project)).toEqual(['root/a', 'root/a/b']);
    expect((await iam.listPrincipals(identity)).map(({ name }) => name)).toEqual(['ann']);
    expect((await iam.listPolicies(identity)).map(({ principal }) => principal)).toEqual(['ann']);
    expect((await iam.listTokens(identity)).map(({ principal }) => principal)).toEqual(['ann']);
    await expect(iam.readAudit(identity, { project: 'root/a' })).rejects.toMatchObject({ code: 'IAM_DENIED' });
    await expect(iam.getQuota(identity, 'root')).rejects.toMatchObject({ code: 'IAM_DENIED' });
    expect((await iam.listPolicies(admin, { project: 'root/a' })).map(({ principal }) => principal)).toEqual(['ann']);
  });

  test('every change is in the audit log, which nobody changes', async () => {
    await iam.createProject(admin, 'root/a');
    await member('ann', 'root/a', ['reader']);
    const records = await iam.readAudit(admin, { project: 'root' });
    expect(records.map(({ action }) => action)).toEqual([
      'token.create',
      'policy.create',
      'principal.create',
      'project.create',
      'token.create',
    ]);
    const [, second] = records;
    expect(await iam.readAudit(admin, { project: 'root', before: second?.id, limit: 1 })).toEqual(records.slice(2, 3));
    expect((await iam.readAudit(admin, { project: 'root/a', action: 'policy.create' })).length).toBe(1);
    const database = await (kind === 'sqlite' ? openSqlite(name) : openPostgres(name));
    for (const sql of ['DELETE FROM iam_audit', "UPDATE iam_audit SET principal = 'x'"]) {
      await expect(database.change(({ run }) => run(sql))).rejects.toThrow('append only');
    }
    await database.close();
    expect((await iam.readAudit(admin, { project: 'root' })).length).toBe(5);
  });

  test('roles are sets of actions, and admin is all of them', async () => {
    const [policy] = await iam.listPolicies(admin);
    expect(policy?.actions).toEqual([...ACTIONS]);
    for (const grants of [[], ['nothing'], ['sandbox.*'], ['__proto__'], ['constructor']]) {
      const tried = iam.createPolicy(admin, { principal: 'admin', project: 'root', grants });
      await expect(tried).rejects.toMatchObject({ code: 'IAM_BAD_REQUEST' });
    }
  });
});
