import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { formatImageReference, normalizedName, parseImageReference } from '../source/image-reference.ts';
import { formatPlatform, hostPlatform, parsePlatform, platformScore } from '../source/platform.ts';
import { describeSource, parseSourceReference } from '../source/reference.ts';
import { failureOf, Workshop } from './image-fixture.ts';

const work = new Workshop();
afterAll(() => work.remove());
const HEX = 'a'.repeat(64);

describe('names of images', () => {
  test.each([
    ['busybox', 'docker.io', 'library/busybox', undefined, undefined],
    ['busybox:1.36', 'docker.io', 'library/busybox', '1.36', undefined],
    ['user/app', 'docker.io', 'user/app', undefined, undefined],
    ['docker.io/busybox', 'docker.io', 'library/busybox', undefined, undefined],
    ['index.docker.io/a/b:c', 'docker.io', 'a/b', 'c', undefined],
    ['localhost/x', 'localhost', 'x', undefined, undefined],
    ['localhost:5000/x/y/z:t', 'localhost:5000', 'x/y/z', 't', undefined],
    ['127.0.0.1:5000/x', '127.0.0.1:5000', 'x', undefined, undefined],
    ['[::1]:5000/x:t', '[::1]:5000', 'x', 't', undefined],
    ['[::1]/x', '[::1]', 'x', undefined, undefined],
    ['ghcr.io/a/b', 'ghcr.io', 'a/b', undefined, undefined],
    ['Host/a', 'host', 'a', undefined, undefined],
    [`x@sha256:${HEX}`, 'docker.io', 'library/x', undefined, `sha256:${HEX}`],
    [`r.io:1/x:t@sha256:${HEX}`, 'r.io:1', 'x', 't', `sha256:${HEX}`],
    ['a/b__c.d--e:_x', 'docker.io', 'a/b__c.d--e', '_x', undefined],
  ])('%s', (text, registry, repository, tag, digest) => {
    expect(parseImageReference(text)).toEqual({ registry, repository, tag, digest });
  });

  test.each([
    '',
    ':tag',
    'UPPER',
    'a//b',
    'a/b/',
    '/a',
    'a:',
    'a:b:c',
    'a:.x',
    `a:${'t'.repeat(129)}`,
    'a/..b',
    'r.io/',
    'r.io:0/x',
    'r.io:99999/x',
    'r.io:x/y',
    'a@sha256:abc',
    `a@sha256:${'A'.repeat(64)}`,
    `a@sha512:${HEX}${HEX}`,
    'a b',
    'r.io/a\n',
    `r.io/${'a'.repeat(300)}`,
  ])('refuses %j', async (text) => {
    expect((await failureOf(() => parseImageReference(text))).code).toBe('SOURCE_REFERENCE');
  });

  test('credentials in a name are not repeated', async () => {
    for (const text of ['docker://joe:hunter2@r.io/x', 'joe:hunter2@r.io/x']) {
      const error = await failureOf(() => parseSourceReference(text));
      expect(`${error.message} ${error.hint}`).not.toContain('hunter2');
    }
  });

  test('whole names', () => {
    expect(normalizedName('busybox')).toBe('docker.io/library/busybox:latest');
    expect(normalizedName('docker.io/library/busybox:latest')).toBe('docker.io/library/busybox:latest');
    expect(normalizedName('No Name')).toBeUndefined();
    expect(formatImageReference(parseImageReference(`x:t@sha256:${HEX}`))).toBe(`docker.io/library/x:t@sha256:${HEX}`);
  });
});

describe('sources', () => {
  test('schemes', () => {
    expect(parseSourceReference('oci:/a/b')).toEqual({ kind: 'oci', path: '/a/b', name: undefined });
    expect(parseSourceReference('oci:/a/b:t')).toEqual({ kind: 'oci', path: '/a/b', name: 't' });
    expect(parseSourceReference('oci:d:docker.io/library/x:1')).toEqual({
      kind: 'oci',
      path: 'd',
      name: 'docker.io/library/x:1',
    });
    expect(parseSourceReference('oci-archive:f.tar:t')).toEqual({ kind: 'oci-archive', path: 'f.tar', name: 't' });
    expect(parseSourceReference('docker-archive:f.tar:x:1')).toEqual({
      kind: 'docker-archive',
      path: 'f.tar',
      name: 'x:1',
      position: undefined,
    });
    expect(parseSourceReference('docker-archive:f.tar:@2')).toMatchObject({ name: undefined, position: 2 });
    expect(parseSourceReference('tar:a:b.tar')).toEqual({ kind: 'tar', path: 'a:b.tar' });
    expect(parseSourceReference('dir:/a:b')).toEqual({ kind: 'dir', path: '/a:b' });
    expect(describeSource(parseSourceReference('docker://busybox'))).toBe('docker://docker.io/library/busybox');
    for (const text of ['oci:/a:t', 'oci-archive:f', 'docker-archive:f:x:1', 'docker-archive:f:@2', 'tar:x', 'dir:x']) {
      expect(describeSource(parseSourceReference(text))).toBe(text);
    }
  });

  test('unknown schemes are told what there is', async () => {
    const bare = await failureOf(() => parseSourceReference('ubuntu:22.04'));
    expect(bare.code).toBe('SOURCE_SCHEME');
    expect(bare.message).toContain('oci:, oci-archive:, docker-archive:, docker://, tar:, dir:');
    expect(bare.hint).toContain('docker://ubuntu:22.04');
    expect((await failureOf(() => parseSourceReference('ghcr.io/a/b'))).hint).toContain('docker://ghcr.io/a/b');
    expect((await failureOf(() => parseSourceReference('https://ghcr.io/a/b'))).hint).toContain('docker://ghcr.io/a/b');
    expect((await failureOf(() => parseSourceReference('./x.tar'))).hint).toContain('tar:./x.tar');
    expect((await failureOf(() => parseSourceReference('docker-daemon:x:y'))).hint).toContain(
      'skopeo copy docker-daemon:x:y',
    );
    expect((await failureOf(() => parseSourceReference('docker:busybox'))).hint).toContain('docker://busybox');
    expect((await failureOf(() => parseSourceReference(''))).code).toBe('SOURCE_SCHEME');
  });

  test('a path with a colon is told the rule', async () => {
    const folder = join(work.path, '12:30');
    mkdirSync(folder);
    for (const text of [`oci:${folder}`, `oci:${folder}:latest`, 'oci:C:\\images\\x']) {
      const error = await failureOf(() => parseSourceReference(text));
      expect(error.code).toBe('SOURCE_REFERENCE');
      expect(error.hint).toContain('ends at the first colon');
    }
    for (const text of [
      'oci:',
      'oci::t',
      'oci:x:',
      'tar:',
      'dir:',
      'tar:a\0b',
      'docker-archive:f:@x',
      `docker-archive:f:a@sha256:${HEX}`,
    ]) {
      expect((await failureOf(() => parseSourceReference(text))).code, text).toBe('SOURCE_REFERENCE');
    }
  });
});

describe('platforms', () => {
  test('parse and format', async () => {
    expect(parsePlatform('linux/amd64')).toEqual({ os: 'linux', architecture: 'amd64' });
    expect(parsePlatform('Linux/x86_64')).toEqual({ os: 'linux', architecture: 'amd64' });
    expect(parsePlatform('linux/arm64/v8')).toEqual({ os: 'linux', architecture: 'arm64', variant: 'v8' });
    expect(formatPlatform(parsePlatform('linux/armhf'))).toBe('linux/arm/v7');
    expect(hostPlatform('x64')).toEqual({ os: 'linux', architecture: 'amd64' });
    for (const text of ['amd64', 'linux/', 'a/b/c/d', 'linux/am d64', '']) {
      expect((await failureOf(() => parsePlatform(text))).code).toBe('SOURCE_PLATFORM_NAME');
    }
  });

  test.each([
    ['linux/amd64', 'linux/amd64', true],
    ['linux/amd64', 'linux/arm64', false],
    ['linux/amd64', 'windows/amd64', false],
    ['linux/arm64', 'linux/arm64/v8', true],
    ['linux/arm64/v8', 'linux/arm64', true],
    ['linux/arm', 'linux/arm/v6', true],
    ['linux/arm/v6', 'linux/arm/v7', false],
    ['linux/amd64', 'linux/amd64/v3', false],
    ['linux/amd64/v3', 'linux/amd64/v2', true],
    ['linux/riscv64/x', 'linux/riscv64/x', true],
    ['linux/riscv64/x', 'linux/riscv64/y', false],
  ])('%s served by %s: %s', (wanted, offered, fits) => {
    expect(platformScore(parsePlatform(wanted), parsePlatform(offered)) > 0).toBe(fits);
  });

  test('the closest variant wins', () => {
    const wanted = parsePlatform('linux/arm/v7');
    const score = (text: string) => platformScore(wanted, parsePlatform(text));
    expect(score('linux/arm/v7')).toBeGreaterThan(score('linux/arm/v6'));
    expect(score('linux/arm/v6')).toBeGreaterThan(score('linux/arm/v5'));
  });
});
