/** `dsec project`, `principal`, `policy`, `token`, `quota`, `audit` against the routes of IAM on a loopback port. */
import { existsSync, mkdtempSync, readFileSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type FastifyInstance, fastify } from 'fastify';
import { afterAll, beforeAll, expect, test, vi } from 'vitest';
import { DsecError } from '#base';
import { bootstrapAdmin, type OpenIam, openIam } from '../iam/open-iam.ts';
import { iamRoutes } from '../iam/routes.ts';
import { runCommand } from './command-run.ts';

vi.setConfig({ testTimeout: 600_000, hookTimeout: 600_000 });

const folder = mkdtempSync(join(tmpdir(), 'dsec-iam-command-'));
const before = { ...process.env };
let iam: OpenIam;
let app: FastifyInstance;

beforeAll(async () => {
  iam = await openIam({ database: join(folder, 'iam.db') });
  app = fastify();
  app.setErrorHandler((error, _request, reply) => {
    const { code, message, hint, exit, http } = error as DsecError;
    return reply.status(error instanceof DsecError ? http : 400).send({ error: { code, message, hint, exit } });
  });
  iamRoutes(app, iam);
  process.env.HOME = folder;
  delete process.env.XDG_CONFIG_HOME;
  process.env.DSEC_API = await app.listen({ host: '127.0.0.1', port: 0 });
  process.env.DSEC_TOKEN = (await bootstrapAdmin(iam)) as string;
});

afterAll(async () => {
  process.env = before;
  app?.server.closeAllConnections();
  await app?.close();
  await iam?.close();
  rmSync(folder, { recursive: true, force: true });
});

const dsec = async (line: string) => {
  const { stdout, stderr } = await runCommand(...line.split(' '));
  return { out: stdout.toString(), stderr };
};
const json = async (line: string) => JSON.parse((await dsec(`${line} --json`)).out);

test('a team is set up, used, looked at and taken down from the command line', async () => {
  expect((await dsec('project create root/team')).out).toBe('root/team\n');
  await dsec('project create root/team/run');
  expect((await json('project ls root/team')).map(({ path }: { path: string }) => path)).toEqual([
    'root/team',
    'root/team/run',
  ]);
  expect((await dsec('principal create ann --project root/team')).out).toBe('ann: user of root/team\n');
  expect(await json('principal create bot --kind agent --project root/team')).toMatchObject({ kind: 'agent' });
  const granted = await json('policy grant ann developer token.admin --on root/team --for 7d');
  expect(granted.expiresAtMs).toBeGreaterThan(Date.now() + 6 * 86_400_000);
  expect((await dsec('policy ls')).out).toContain(granted.id);

  const set = await dsec('quota set root/team --sandboxes 10 --cpus 1.5 --memory 2GiB');
  expect(set.out.split('\n')[1]).toMatch(/^root\/team +0 \/ 10 +0 \/ 1\.5 +0 B \/ 2\S* \S+ +0 B \/ -$/);
  await dsec('quota set root/team --cpus none');
  expect((await json('quota ls root/team'))[0].limits).toEqual({ sandboxes: 10, memoryBytes: 2 ** 31 });

  const file = join(folder, 'token');
  const made = await json(`token create --principal ann --project root/team --grant developer --file ${file}`);
  expect(made.secret).toBeUndefined();
  expect(statSync(file).mode & 0o777).toBe(0o600);
  const printed = await dsec('token create --principal ann --project root/team --for 1h');
  expect(printed.out).toMatch(/^dsec_[\w-]{49}\n$/);
  expect(printed.stderr).toContain('ann on root/team, until');
  expect(JSON.stringify(await json('token ls --principal ann'))).not.toContain(printed.out.trim());
  await expect(dsec(`token create --file ${file}`)).rejects.toMatchObject({ code: 'CLI_OUTPUT_EXISTS' });

  const admin = process.env.DSEC_TOKEN;
  process.env.DSEC_TOKEN = readFileSync(file, 'utf8').trim();
  expect(await json('token whoami')).toMatchObject({ principal: 'ann', project: 'root/team' });
  await expect(dsec('project create root/team/x')).rejects.toMatchObject({ code: 'IAM_DENIED', exit: 5 });
  process.env.DSEC_TOKEN = admin;
  expect((await dsec(`token revoke ${made.id}`)).out).toBe(`${made.id}: revoked\n`);
  expect((await dsec('token ls --ended --principal ann')).out).toContain('revoked');

  expect((await dsec('principal disable ann')).out).toBe('ann: disabled\n');
  expect((await dsec('principal enable ann')).out).toBe('ann: enabled\n');
  expect((await dsec(`policy rm ${granted.id}`)).out).toBe(`${granted.id}: removed\n`);
  await expect(dsec('project rm root/team')).rejects.toMatchObject({ code: 'IAM_NOT_EMPTY', exit: 1 });
  expect((await dsec('project rm root/team/run')).out).toBe('root/team/run: removed\n');
  expect((await dsec('audit --limit 2')).out).toContain('project.remove');
  const page = await json('audit --project root --limit 1');
  expect((await json(`audit --project root --limit 1 --before ${page[0].id}`))[0].id).toBeLessThan(page[0].id);
});

test('what cannot be is said, and what to do', async () => {
  const usage = { code: 'CLI_USAGE' };
  await expect(dsec('quota set root')).rejects.toMatchObject(usage);
  await expect(dsec('quota set root --sandboxes 1.5')).rejects.toMatchObject(usage);
  await expect(dsec('quota set root --cpus x')).rejects.toMatchObject(usage);
  await expect(dsec('principal create x --kind robot')).rejects.toMatchObject(usage);
  await expect(dsec('audit --limit 0')).rejects.toMatchObject(usage);
  await expect(dsec('policy grant admin nonsense --on root')).rejects.toMatchObject({
    code: 'IAM_BAD_REQUEST',
    exit: 2,
  });
  const unmade = join(folder, 'unmade');
  await expect(dsec(`token create --grant nonsense --file ${unmade}`)).rejects.toMatchObject({
    code: 'IAM_BAD_REQUEST',
  });
  expect(existsSync(unmade)).toBe(false);
  await expect(dsec('token create --for 0')).rejects.toMatchObject({ code: 'CLI_DURATION' });
  await expect(dsec('project ls root/nowhere')).resolves.toMatchObject({ out: '' });
  await expect(dsec('project ls --api local')).rejects.toMatchObject({ code: 'CONTEXT_NEEDED' });
  await expect(dsec('project ls --api http://127.0.0.1:1')).rejects.toMatchObject({ code: 'SERVICE_UNREACHABLE' });
  const token = process.env.DSEC_TOKEN;
  process.env.DSEC_TOKEN = 'dsec_nonsense';
  await expect(dsec('project ls')).rejects.toMatchObject({ code: 'IAM_TOKEN_INVALID', exit: 5 });
  process.env.DSEC_TOKEN = token;
});
