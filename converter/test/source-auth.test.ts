import { chmodSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, beforeEach, describe, expect, test } from 'vitest';
import { parseChallenges } from '../source/challenge.ts';
import { findCredentials, parseCredentials } from '../source/credentials.ts';
import { RegistryClient } from '../source/registry-client.ts';
import { type Asked, FakeRegistry, type Handler, refuse, sendJson, TestClock } from './fake-registry.ts';
import { failureOf, OCI, Workshop } from './image-fixture.ts';

const work = new Workshop();
afterAll(() => work.remove());

describe('WWW-Authenticate', () => {
  const parsed = (header: string) => parseChallenges(header).map((c) => [c.scheme, Object.fromEntries(c.params)]);
  test.each<[string, unknown]>([
    ['Basic realm="x"', [['basic', { realm: 'x' }]]],
    [
      'Bearer realm="https://a/t?x=1,2",service="a, b",scope="repository:a:pull,push"',
      [['bearer', { realm: 'https://a/t?x=1,2', service: 'a, b', scope: 'repository:a:pull,push' }]],
    ],
    [
      'Basic realm="a", Bearer realm="b" , service=c',
      [
        ['basic', { realm: 'a' }],
        ['bearer', { realm: 'b', service: 'c' }],
      ],
    ],
    [
      'Negotiate dG9rZW4=, BEARER Realm = "b"',
      [
        ['negotiate', {}],
        ['bearer', { realm: 'b' }],
      ],
    ],
    [
      'Negotiate, Basic realm=x',
      [
        ['negotiate', {}],
        ['basic', { realm: 'x' }],
      ],
    ],
    ['Bearer realm=https://a/token,service=s', [['bearer', { realm: 'https://a/token', service: 's' }]]],
    ['Basic realm="a \\"quoted\\" \\\\ b"', [['basic', { realm: 'a "quoted" \\ b' }]]],
    ['Basic realm="never ends', [['basic', {}]]],
    ['', []],
    ['=,=,"', []],
  ])('%s', (header, expected) => {
    expect(parsed(header)).toEqual(expected);
  });
});

describe('credentials', () => {
  function home(config: unknown, name = '.docker/config.json'): NodeJS.ProcessEnv {
    const folder = work.fresh('home');
    mkdirSync(join(folder, name, '..'), { recursive: true });
    writeFileSync(join(folder, name), typeof config === 'string' ? config : JSON.stringify(config));
    return { HOME: folder, PATH: `${folder}:${process.env.PATH}` };
  }
  const auth = (text: string) => ({ auth: Buffer.from(text).toString('base64') });
  const found = async (env: NodeJS.ProcessEnv, registry: string, repository = 'a/b') =>
    (await findCredentials(registry, repository, env)).credentials;
  const password = (user: string, secret: string) => ({ kind: 'password', user, password: secret });

  test('--creds', async () => {
    expect(parseCredentials('u:p:q')).toEqual(password('u', 'p:q'));
    for (const text of ['secret', ':secret']) {
      const error = await failureOf(() => parseCredentials(text));
      expect(error.code).toBe('SOURCE_CREDENTIALS');
      expect(error.message).not.toContain('secret');
    }
  });

  test('auths: base64, identity tokens, the old keys', async () => {
    const env = home({
      auths: {
        'https://index.docker.io/v1/': auth('hub:h'),
        'r.io:5000': auth('r:pass:word'),
        'https://old.io/v2/': auth('old:o'),
        'token.io': { identitytoken: 'ID', ...auth('x:y') },
        'empty.io': {},
        'bad.io': { auth: 'AAAA' },
      },
    });
    expect(await found(env, 'docker.io')).toEqual(password('hub', 'h'));
    expect(await found(env, 'r.io:5000')).toEqual(password('r', 'pass:word'));
    expect(await found(env, 'r.io')).toBeUndefined();
    expect(await found(env, 'old.io')).toEqual(password('old', 'o'));
    expect(await found(env, 'token.io')).toEqual({ kind: 'identity', token: 'ID' });
    expect(await found(env, 'empty.io')).toBeUndefined();
    expect((await failureOf(found(env, 'bad.io'))).message).toContain('bad.io');
  });

  test('DOCKER_CONFIG, auth.json with paths, REGISTRY_AUTH_FILE come in their order', async () => {
    const env = home({ auths: { 'r.io': auth('docker:d') } });
    const run = home(
      { auths: { 'r.io': auth('host:h'), 'r.io/a': auth('group:g'), 'r.io/a/b': auth('exact:e') } },
      'containers/auth.json',
    );
    const both = { ...env, XDG_RUNTIME_DIR: run.HOME };
    expect(await found(both, 'r.io', 'a/b')).toEqual(password('exact', 'e'));
    expect(await found(both, 'r.io', 'a/c')).toEqual(password('group', 'g'));
    expect(await found(both, 'r.io', 'x')).toEqual(password('host', 'h'));
    const other = home({ auths: { 'r.io': auth('other:o') } }, 'x/config.json');
    expect(await found({ ...env, DOCKER_CONFIG: join(other.HOME!, 'x') }, 'r.io')).toEqual(password('other', 'o'));
    expect(await found({ ...both, REGISTRY_AUTH_FILE: join(other.HOME!, 'x/config.json') }, 'r.io')).toEqual(
      password('other', 'o'),
    );
    expect(await found({ HOME: '/does/not/exist' }, 'r.io')).toBeUndefined();
  });

  test('a broken file is named and not quoted', async () => {
    for (const text of ['{"auths":{"r.io":{"auth":"c2VjcmV0"', '["c2VjcmV0"]']) {
      const error = await failureOf(found(home(text), 'r.io'));
      expect(error.code).toBe('SOURCE_CREDENTIALS');
      expect(error.message).toContain('config.json');
      expect(error.message).not.toContain('c2VjcmV0');
    }
  });

  test('helpers: asked by server, tokens, nothing found, failing, missing', async () => {
    const env = home({
      auths: { 'fallback.io': auth('f:f'), 'broken.io': auth('b:b') },
      credHelpers: {
        'r.io': 'test',
        'docker.io': 'test',
        'missing.io': 'not-there',
        'odd.io': '../evil',
        'broken.io': 'broken',
      },
      credsStore: 'test',
    });
    const script = (name: string, text: string) => {
      writeFileSync(join(env.HOME!, `docker-credential-${name}`), `#!/bin/sh\n${text}`);
      chmodSync(join(env.HOME!, `docker-credential-${name}`), 0o755);
    };
    script(
      'test',
      `read server
case "$1 $server" in
  "get r.io") echo '{"ServerURL":"r.io","Username":"u","Secret":"s"}';;
  "get https://index.docker.io/v1/") echo '{"Username":"<token>","Secret":"T"}';;
  *) echo "credentials not found in native keychain"; exit 1;;
esac`,
    );
    script('broken', 'echo secret; exit 3');
    expect(await found(env, 'r.io')).toEqual(password('u', 's'));
    expect(await found(env, 'docker.io')).toEqual({ kind: 'identity', token: 'T' });
    expect(await findCredentials('fallback.io', 'x', env)).toEqual({ credentials: password('f', 'f'), notes: [] });
    expect(await findCredentials('missing.io', 'x', env)).toEqual({
      credentials: undefined,
      notes: ['docker-credential-not-there is not installed'],
    });
    expect((await findCredentials('odd.io', 'x', env)).notes).toEqual([
      'the credential helper "../evil" has no usable name',
    ]);
    expect(await findCredentials('broken.io', 'x', env)).toEqual({
      credentials: password('b', 'b'),
      notes: ['docker-credential-broken failed (status 3)'],
    });
  });
});

describe('tokens', () => {
  let registry: FakeRegistry;
  let tokens: FakeRegistry;
  const clients: RegistryClient[] = [];
  const clock = new TestClock();
  let valid = new Set<string>();
  let issued = 0;
  const manifest = { schemaVersion: 2, mediaType: `${OCI}.index.v1+json`, manifests: [] };

  beforeEach(async () => {
    registry = await FakeRegistry.start();
    tokens = await FakeRegistry.start();
    registry.addManifest('a/b', 'latest', manifest, manifest.mediaType);
    issued = 0;
    valid = new Set();
    registry.intercept = wanting(() => tokens);
    tokens.intercept = issuing({});
  });
  afterEach(async () => {
    await Promise.all(clients.splice(0).map((client) => client.close()));
    await Promise.all([registry.close(), tokens.close()]);
  });

  /** Answers 401 with the challenge unless a valid token comes. */
  function wanting(server: () => FakeRegistry, scope = 'repository:a/b:pull'): Handler {
    return (asked, response) => {
      if (asked.authorization !== undefined && valid.has(asked.authorization)) return false;
      const challenge = `Bearer realm="${server().origin}/token?x=1,2",service="test, service",scope="${scope}"`;
      return refuse(response, 401, 'UNAUTHORIZED', `no, not ${asked.authorization}`, { 'www-authenticate': challenge });
    };
  }

  function issuing(extra: Record<string, unknown>, field = 'token'): Handler {
    return (_asked, response) => {
      const token = `token-${++issued}`;
      valid.add(`Bearer ${token}`);
      return sendJson(response, { [field]: token, ...extra });
    };
  }

  function client(credentials?: string, env: NodeJS.ProcessEnv = {}): RegistryClient {
    const made = new RegistryClient({ registry: registry.host, credentials, env: { HOME: work.path, ...env }, clock });
    clients.push(made);
    return made;
  }

  const query = (asked: Asked) => new URL(asked.url, 'http://x').searchParams;

  test('anonymous: realm with commas, service, scope', async () => {
    expect((await client().getManifest('a/b', 'latest')).mediaType).toBe(manifest.mediaType);
    expect(tokens.asked).toHaveLength(1);
    expect(query(tokens.asked[0]!).get('x')).toBe('1,2');
    expect(query(tokens.asked[0]!).get('service')).toBe('test, service');
    expect(query(tokens.asked[0]!).getAll('scope')).toEqual(['repository:a/b:pull']);
    expect(tokens.asked[0]!.authorization).toBeUndefined();
    expect(registry.calls.map((asked) => asked.authorization)).toEqual([undefined, 'Bearer token-1']);
  });

  test('the password goes to the token server, the token to the registry', async () => {
    await client('joe:hunter2').getManifest('a/b', 'latest');
    expect(tokens.asked[0]!.authorization).toBe(`Basic ${Buffer.from('joe:hunter2').toString('base64')}`);
    expect(query(tokens.asked[0]!).get('account')).toBe('joe');
    expect(registry.asked.some((asked) => asked.authorization?.startsWith('Basic'))).toBe(false);
  });

  test('an identity token is posted', async () => {
    const folder = work.fresh('home');
    mkdirSync(folder);
    writeFileSync(
      join(folder, 'config.json'),
      JSON.stringify({ auths: { [registry.host]: { identitytoken: 'ID-TOKEN' } } }),
    );
    tokens.intercept = issuing({}, 'access_token');
    await client(undefined, { DOCKER_CONFIG: folder }).getManifest('a/b', 'latest');
    expect(tokens.asked[0]!.method).toBe('POST');
    expect(tokens.asked[0]!.url).not.toContain('ID-TOKEN');
    expect(Object.fromEntries(new URLSearchParams(tokens.asked[0]!.body.toString()))).toEqual({
      grant_type: 'refresh_token',
      client_id: 'dsec',
      refresh_token: 'ID-TOKEN',
      service: 'test, service',
      scope: 'repository:a/b:pull',
    });
  });

  test('an identity token is not posted on to another host', async () => {
    const folder = work.fresh('home');
    mkdirSync(folder);
    writeFileSync(
      join(folder, 'config.json'),
      JSON.stringify({ auths: { [registry.host]: { identitytoken: 'ID-TOKEN' } } }),
    );
    tokens.intercept = (_asked, response) => refuse(response, 307, 'x', 'x', { location: `${registry.origin}/stolen` });
    const error = await failureOf(client(undefined, { DOCKER_CONFIG: folder }).getManifest('a/b', 'latest'));
    expect(error.code).toBe('SOURCE_REGISTRY_REDIRECT');
    expect(registry.asked.some((asked) => asked.url === '/stolen')).toBe(false);
  });

  test('one token for many requests, another one before it expires', async () => {
    tokens.intercept = issuing({ expires_in: 100 });
    const c = client();
    await c.getManifest('a/b', 'latest');
    await Promise.all(Array.from({ length: 20 }, () => c.getManifest('a/b', 'latest')));
    expect(tokens.asked).toHaveLength(1);
    clock.time += 95_000;
    const before = registry.calls.length;
    await Promise.all(Array.from({ length: 5 }, () => c.getManifest('a/b', 'latest')));
    expect(tokens.asked).toHaveLength(2);
    expect(registry.calls.slice(before).map((asked) => asked.authorization)).toEqual(Array(5).fill('Bearer token-2'));
  });

  test('a token that the registry no longer takes is replaced', async () => {
    const c = client();
    await c.getManifest('a/b', 'latest');
    valid.clear();
    await Promise.all([c.getManifest('a/b', 'latest'), c.getManifest('a/b', 'latest')]);
    expect(tokens.asked).toHaveLength(2);
  });

  test('the realm moves', async () => {
    const c = client('joe:hunter2');
    await c.getManifest('a/b', 'latest');
    const moved = await FakeRegistry.start();
    try {
      moved.intercept = issuing({});
      valid.clear();
      registry.intercept = wanting(() => moved);
      await c.getManifest('a/b', 'latest');
      expect(tokens.asked).toHaveLength(1);
      expect(moved.asked).toHaveLength(1);
      expect(moved.asked[0]!.authorization).toContain('Basic');
    } finally {
      await moved.close();
    }
  });

  test('a registry that refuses every token is left after one more try', async () => {
    tokens.intercept = (_asked, response) => sendJson(response, { token: `worthless-${++issued}` });
    const error = await failureOf(client('joe:hunter2').getManifest('a/b', 'latest'));
    expect(error.code).toBe('SOURCE_REGISTRY_UNAUTHORIZED');
    expect(error.hint).toContain(`docker login ${registry.host}`);
    expect(error.message).toContain('a/b');
    // The server repeats what it was sent.
    expect(`${error.message}${error.hint}`).not.toMatch(/worthless|hunter2/);
    expect(error.message).toContain('***');
    expect(tokens.asked).toHaveLength(1);
    expect(registry.calls).toHaveLength(2);
  });

  test('a realm that is another one each time does not go on for ever', async () => {
    let n = 0;
    registry.intercept = (_asked, response) =>
      refuse(response, 401, 'X', 'x', { 'www-authenticate': `Bearer realm="${tokens.origin}/${n++}"` });
    expect((await failureOf(client().getManifest('a/b', 'latest'))).code).toBe('SOURCE_REGISTRY_UNAUTHORIZED');
    expect(registry.calls.length).toBeLessThan(6);
  });

  test('credentials refused by the token server', async () => {
    tokens.intercept = (asked, response) => refuse(response, 401, 'X', asked.authorization ?? '');
    const error = await failureOf(client('joe:hunter2').getManifest('a/b', 'latest'));
    expect(error.code).toBe('SOURCE_REGISTRY_UNAUTHORIZED');
    expect(error.message).toContain('refused the credentials');
    expect(error.message).not.toMatch(/hunter2|am9l/);
  });

  test('a token server that is busy is asked again; one that talks nonsense is named, its words are not', async () => {
    let n = 0;
    const issue = issuing({});
    tokens.intercept = (asked, response, request) =>
      n++ < 2 ? refuse(response, 503, 'X', 'x', { 'retry-after': '7' }) : issue(asked, response, request);
    clock.slept.length = 0;
    await client().getManifest('a/b', 'latest');
    expect(clock.slept).toEqual([7000, 7000]);
    for (const answer of ['"secret-a', '{"token":17}', '{"token":"secret-b\\n"}', '[]', 'null']) {
      tokens.intercept = (_asked, response) => {
        response.end(answer);
        return true;
      };
      const error = await failureOf(client().getManifest('a/b', 'latest'));
      expect(error.code).toBe('SOURCE_REGISTRY_RESPONSE');
      expect(error.message).not.toContain('secret');
    }
  });

  test('credentials never go to an unencrypted token server elsewhere', async () => {
    registry.intercept = (_asked, response) =>
      refuse(response, 401, 'X', 'x', { 'www-authenticate': 'Bearer realm="http://192.0.2.1/token"' });
    const error = await failureOf(client('joe:hunter2').getManifest('a/b', 'latest'));
    expect(error.code).toBe('SOURCE_REGISTRY_RESPONSE');
    expect(error.message).toContain('unencrypted');
  });

  test('Basic: the password itself, once', async () => {
    const wanted = `Basic ${Buffer.from('joe:hunter2').toString('base64')}`;
    registry.intercept = (asked, response) =>
      asked.authorization === wanted
        ? false
        : refuse(response, 401, 'X', `got ${asked.authorization}`, { 'www-authenticate': 'Basic realm="r"' });
    await client('joe:hunter2').getManifest('a/b', 'latest');
    const before = registry.calls.length;
    const wrong = await failureOf(client('joe:wrong-one').getManifest('a/b', 'latest'));
    expect(wrong.code).toBe('SOURCE_REGISTRY_UNAUTHORIZED');
    expect(wrong.message).not.toContain(Buffer.from('joe:wrong-one').toString('base64'));
    expect(registry.calls.length - before).toBe(2);
    expect((await failureOf(client().getManifest('a/b', 'latest'))).code).toBe('SOURCE_REGISTRY_UNAUTHORIZED');
  });
});
