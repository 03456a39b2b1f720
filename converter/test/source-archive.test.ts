import { execFileSync, spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { gzipSync } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { digestOf, hexOf, isDsecError } from '#base';
import type { SourceImage, SourceOptions } from '../source/image-source.ts';
import { openSource } from '../source/open-source.ts';
import { hostPlatform, parsePlatform } from '../source/platform.ts';
import { indexTar } from '../source/tar-index.ts';
import { failureOf, ImageFixture, type TarInput, tarOf, Workshop } from './image-fixture.ts';

const work = new Workshop();
afterAll(() => work.remove());
const HOST = hostPlatform().architecture;
const zstd = spawnSync('zstd', ['--version']).status === 0;
if (!zstd) console.log('skipped: an archive in zstd needs the zstd program');
let one: Buffer;
let two: Buffer;

beforeAll(async () => {
  one = await tarOf([{ name: 'a', content: 'one' }]);
  two = await tarOf([{ name: 'b', content: 'two'.repeat(5000) }]);
});

async function resolve(reference: string, options: SourceOptions = {}): Promise<SourceImage> {
  const source = await openSource(reference, options);
  try {
    return await source.resolve();
  } finally {
    await source.close();
  }
}

async function file(members: readonly TarInput[]): Promise<string> {
  const path = work.fresh('archive');
  writeFileSync(path, await tarOf(members));
  return path;
}

function bytesOf(image: SourceImage, i: number): Buffer {
  const { input } = image.layers[i]!;
  if (input.kind !== 'file') throw new Error(input.kind);
  return readFileSync(input.path).subarray(input.offset, input.offset + input.sizeBytes);
}

const configOf = (tars: Buffer[], architecture = HOST) =>
  JSON.stringify({ architecture, os: 'linux', rootfs: { type: 'layers', diff_ids: tars.map(digestOf) } });

function manifest(images: { Config: string; RepoTags?: string[] | null; Layers?: string[] | null }[]): TarInput {
  return { name: 'manifest.json', content: JSON.stringify(images) };
}

describe('docker-archive', () => {
  test('as docker save has always written it, links among layers too', async () => {
    const config = configOf([one, two, one]);
    const configName = `${hexOf(digestOf(config))}.json`;
    const path = await file([
      { name: 'l1/', type: 'directory' },
      { name: 'l1/layer.tar', content: one },
      { name: './l2/layer.tar', content: gzipSync(two) },
      { name: 'l3/layer.tar', type: 'symlink', linkname: '../l1/layer.tar' },
      { name: configName, content: config },
      manifest([
        { Config: configName, RepoTags: ['case:latest'], Layers: ['l1/layer.tar', 'l2/layer.tar', 'l3/layer.tar'] },
      ]),
    ]);
    for (const name of ['', ':case', ':case:latest', ':docker.io/library/case:latest', ':@0']) {
      const image = await resolve(`docker-archive:${path}${name}`);
      expect(image.config.toString()).toBe(config);
      expect(image.manifestDigest).toBeUndefined();
      expect([0, 1, 2].map((i) => bytesOf(image, i))).toEqual([one, gzipSync(two), one]);
      expect(image.layers.map((layer) => [layer.digest, layer.diffId, layer.compression])).toEqual(
        [one, two, one].map((tar) => [undefined, digestOf(tar), 'detect']),
      );
    }
    expect((await failureOf(resolve(`docker-archive:${path}:other`))).message).toContain('case:latest');
    expect((await failureOf(resolve(`docker-archive:${path}:@1`))).code).toBe('SOURCE_NAME_MISSING');
    const platform = parsePlatform('linux/s390x');
    expect((await failureOf(resolve(`docker-archive:${path}`, { platform }))).code).toBe('SOURCE_PLATFORM');
  });

  test('hard links, by their names in the archive', async () => {
    const config = configOf([one, one]);
    const path = await file([
      { name: 'l1/layer.tar', content: one },
      { name: 'l2/layer.tar', type: 'link', linkname: 'l1/layer.tar' },
      { name: 'c', content: config },
      manifest([{ Config: 'c', RepoTags: null, Layers: ['l1/layer.tar', 'l2/layer.tar'] }]),
    ]);
    expect(bytesOf(await resolve(`docker-archive:${path}`), 1)).toEqual(one);
  });

  test('several images: chosen by tag or position, otherwise listed', async () => {
    const path = await file([
      { name: 'l1', content: one },
      { name: 'l2', content: two },
      { name: 'c1', content: configOf([one]) },
      { name: 'c2', content: configOf([two]) },
      manifest([
        { Config: 'c1', RepoTags: ['x:1', 'docker.io/library/y:latest'], Layers: ['l1'] },
        { Config: 'c2', RepoTags: null, Layers: ['l2'] },
      ]),
    ]);
    expect(bytesOf(await resolve(`docker-archive:${path}:y`), 0)).toEqual(one);
    expect(bytesOf(await resolve(`docker-archive:${path}:@1`), 0)).toEqual(two);
    const error = await failureOf(resolve(`docker-archive:${path}`));
    expect(error.code).toBe('SOURCE_AMBIGUOUS');
    expect(error.message).toContain('x:1, docker.io/library/y:latest, @1');
  });

  test('with an OCI layout in it, as newer versions write it', async () => {
    const fixture = new ImageFixture();
    const image = fixture.image([one], HOST);
    fixture.name(image, 'latest');
    const parsed = JSON.parse(fixture.blobs.get(image.digest)!.toString());
    const blob = (d: { digest: string }) => `blobs/sha256/${d.digest.slice(7)}`;
    fixture.files.set(
      'manifest.json',
      Buffer.from(
        JSON.stringify([{ Config: blob(parsed.config), RepoTags: ['n:latest'], Layers: [blob(parsed.layers[0])] }]),
      ),
    );
    const path = await fixture.archive(work.fresh('both'));
    const docker = await resolve(`docker-archive:${path}:n`);
    const oci = await resolve(`oci-archive:${path}:latest`);
    expect(bytesOf(docker, 0)).toEqual(bytesOf(oci, 0));
    expect(docker.config).toEqual(oci.config);
  });

  test('what is wrong is named', async () => {
    const config = configOf([one]);
    const l1: TarInput = { name: 'l1', content: one };
    const c: TarInput = { name: 'c', content: config };
    const wrongName = `${'0'.repeat(64)}.json`;
    const cases: [string, string, TarInput[]][] = [
      ['SOURCE_ARCHIVE', 'no manifest.json', [l1]],
      ['SOURCE_ARCHIVE', 'oci-archive:', [{ name: 'oci-layout', content: '{}' }]],
      ['SOURCE_ARCHIVE', 'names no image', [manifest([])]],
      ['SOURCE_FIELD', '[0].Config', [{ name: 'manifest.json', content: '[{}]' }]],
      ['SOURCE_FIELD', '(top)', [{ name: 'manifest.json', content: '{}' }]],
      ['SOURCE_BLOB_MISSING', 'config', [l1, manifest([{ Config: 'c', Layers: ['l1'] }])]],
      ['SOURCE_BLOB_MISSING', 'layer 1/1', [c, manifest([{ Config: 'c', Layers: ['l1'] }])]],
      ['SOURCE_DIFF_IDS', '2 layers', [l1, c, manifest([{ Config: 'c', Layers: ['l1', 'l1'] }])]],
      [
        'SOURCE_DIGEST_MISMATCH',
        'config',
        [l1, { name: wrongName, content: config }, manifest([{ Config: wrongName, Layers: ['l1'] }])],
      ],
      [
        'SOURCE_ARCHIVE',
        'leads nowhere',
        [{ name: 'l1', type: 'symlink', linkname: 'l1' }, c, manifest([{ Config: 'c', Layers: ['l1'] }])],
      ],
      [
        'SOURCE_BLOB_MISSING',
        'layer 1/1',
        [{ name: 'l1', type: 'symlink', linkname: '/etc/passwd' }, c, manifest([{ Config: 'c', Layers: ['l1'] }])],
      ],
      [
        'SOURCE_ARCHIVE',
        'not a file',
        [{ name: 'l1', type: 'directory' }, c, manifest([{ Config: 'c', Layers: ['l1'] }])],
      ],
    ];
    for (const [code, part, members] of cases) {
      const error = await failureOf(resolve(`docker-archive:${await file(members)}`));
      expect(error.code, error.message).toBe(code);
      expect(error.message).toContain(part);
    }
  });
});

describe('compressed archives', () => {
  test('inflated once, removed at the end; damage is named', async () => {
    const plain = readFileSync(
      await file([
        { name: 'l1', content: two },
        { name: 'c', content: configOf([two]) },
        manifest([{ Config: 'c', Layers: ['l1'] }]),
      ]),
    );
    const path = work.fresh('compressed');
    writeFileSync(path, gzipSync(plain));
    const source = await openSource(`docker-archive:${path}`, { workDir: work.path });
    const image = await source.resolve();
    expect(bytesOf(image, 0)).toEqual(two);
    const { input } = image.layers[0]!;
    expect(input.kind === 'file' && input.path.startsWith(work.path)).toBe(true);
    await source.close();
    expect(() => bytesOf(image, 0)).toThrow('ENOENT');

    writeFileSync(path, gzipSync(plain).subarray(0, -100));
    const error = await failureOf(resolve(`docker-archive:${path}`, { workDir: work.path }));
    expect(error.code).toBe('SOURCE_ARCHIVE');
    expect(error.message).toContain('damaged gzip');
    for (const [magic, command] of [
      ['fd377a585a00', 'xz -d'],
      ['425a6839', 'bzip2 -d'],
    ] as const) {
      writeFileSync(path, Buffer.from(magic, 'hex'));
      const refused = await failureOf(resolve(`oci-archive:${path}`));
      expect(refused.code).toBe('SOURCE_ARCHIVE_COMPRESSION');
      expect(refused.hint).toContain(command);
    }
  });

  test.skipIf(!zstd)('zstd', async () => {
    const path = await file([
      { name: 'l1', content: two },
      { name: 'c', content: configOf([two]) },
      manifest([{ Config: 'c', Layers: ['l1'] }]),
    ]);
    execFileSync('zstd', ['-q', path]);
    const source = await openSource(`docker-archive:${path}.zst`, { workDir: work.path });
    expect(bytesOf(await source.resolve(), 0)).toEqual(two);
    await source.close();
  });

  test('an aborted one leaves nothing', async () => {
    const path = work.fresh('compressed');
    writeFileSync(path, gzipSync(Buffer.alloc(1 << 20)));
    const source = await openSource(`oci-archive:${path}`, { workDir: work.path, signal: AbortSignal.abort() });
    expect((await failureOf(source.resolve())).name).toBe('AbortError');
    await source.close();
    expect(execFileSync('find', [work.path, '-name', 'dsec-source-*', '-mindepth', '1']).toString()).toBe('');
  });
});

describe('tar: and dir:', () => {
  test('one layer, and a config that tells nothing of this machine', async () => {
    const path = work.fresh('x.tar');
    writeFileSync(path, one);
    const image = await resolve(`tar:${path}`, { platform: parsePlatform('linux/arm64/v8') });
    expect(image.config.toString()).toBe(
      '{"architecture":"arm64","variant":"v8","os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":[]}}',
    );
    expect(image.layers).toMatchObject([
      { compression: 'detect', digest: undefined, diffId: undefined, sizeBytes: one.length },
    ]);
    expect(bytesOf(image, 0)).toEqual(one);
    const folder = await resolve(`dir:${work.path}`);
    expect(folder.layers[0]!.input).toEqual({ kind: 'folder', path: work.path });
    expect(JSON.parse(folder.config.toString()).architecture).toBe(HOST);
  });

  test('missing, empty, of the wrong kind', async () => {
    const empty = work.fresh('empty');
    writeFileSync(empty, '');
    expect((await failureOf(resolve('tar:/does/not/exist'))).code).toBe('SOURCE_PATH');
    expect((await failureOf(resolve(`tar:${work.path}`))).message).toContain('a folder');
    expect((await failureOf(resolve(`tar:${empty}`))).code).toBe('SOURCE_ARCHIVE');
    expect((await failureOf(resolve(`oci-archive:${empty}`))).code).toBe('SOURCE_ARCHIVE');
    expect((await failureOf(resolve(`dir:${empty}`))).message).toContain('not a folder');
    expect((await failureOf(resolve('dir:/does/not/exist'))).code).toBe('SOURCE_PATH');
  });
});

describe('the index of a tar', () => {
  const long = 'd/'.repeat(90) + 'n'.repeat(90);

  test('long names of every dialect, as GNU tar writes them', async () => {
    const root = work.fresh('tree');
    execFileSync('mkdir', ['-p', `${root}/${long.slice(0, 180)}`]);
    writeFileSync(`${root}/${long}`, 'long');
    writeFileSync(`${root}/short`, 'short');
    for (const format of ['gnu', 'pax', 'posix', 'oldgnu']) {
      const path = work.fresh('dialect');
      execFileSync('tar', ['-C', root, `--format=${format}`, '-cf', path, '.']);
      const members = await indexTar(path);
      const bytes = readFileSync(path);
      for (const [name, content] of [
        [long, 'long'],
        ['short', 'short'],
      ] as const) {
        const member = members.get(name)!;
        expect(bytes.subarray(member.offset, member.offset + member.sizeBytes).toString(), `${format} ${name}`).toBe(
          content,
        );
      }
    }
  });

  test('the last of two equal names; a size in base 256', async () => {
    const path = await file([
      { name: 'x', content: 'old' },
      { name: 'x', content: 'newer' },
    ]);
    expect((await indexTar(path)).get('x')).toEqual({ type: 'file', offset: 1536, sizeBytes: 5, target: '' });
    const bytes = readFileSync(path);
    bytes.fill(0, 124, 136);
    bytes[124] = 0x80;
    bytes[135] = 3;
    bytes.write('        ', 148);
    const sum = bytes.subarray(0, 512).reduce((a, b) => a + b, 0);
    bytes.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148);
    writeFileSync(path, bytes);
    expect((await indexTar(path)).size).toBe(1);
  });

  test('sparse members are refused', async () => {
    const root = work.fresh('tree');
    execFileSync('mkdir', [root]);
    execFileSync('truncate', ['-s', '1M', `${root}/hole`]);
    for (const format of ['gnu', 'pax']) {
      const path = work.fresh('sparse');
      execFileSync('tar', ['-C', root, '-S', `--format=${format}`, '-cf', path, 'hole']);
      expect((await failureOf(indexTar(path))).message).toContain('sparse');
    }
  });

  test('cut anywhere: an index or a named error, never more', async () => {
    const whole = readFileSync(
      await file([
        { name: 'x', content: 'y'.repeat(700) },
        { name: 'n'.repeat(150), content: 'z' },
      ]),
    );
    const path = work.fresh('cut');
    for (let length = 1; length < whole.length; length += 97) {
      writeFileSync(path, whole.subarray(0, length));
      const result = await indexTar(path).catch((error: unknown) => error);
      if (result instanceof Map) expect(length).toBeGreaterThanOrEqual(512 + 700);
      else expect(isDsecError(result, 'SOURCE_ARCHIVE'), String(result)).toBe(true);
    }
  });

  test('random damage never crashes it', async () => {
    const whole = readFileSync(
      await file([
        { name: 'x', content: 'y' },
        { name: 'n'.repeat(150), content: 'z', pax: { comment: 'c' } },
      ]),
    );
    const path = work.fresh('fuzz');
    let seed = 12345;
    const random = (n: number) => {
      seed = (Math.imul(seed, 1103515245) + 12345) >>> 0;
      return (seed >>> 8) % n;
    };
    for (let round = 0; round < 400; round++) {
      const bytes = Buffer.from(whole);
      for (let k = 0; k < 1 + random(4); k++) bytes[random(bytes.length)] = random(256);
      // Half of them with checksums that hold, so that what lies behind is reached.
      if (round % 2) {
        for (let at = 0; at + 512 <= bytes.length; at += 512) {
          if (bytes.toString('latin1', at + 257, at + 262) !== 'ustar') continue;
          bytes.write('        ', at + 148);
          const sum = bytes.subarray(at, at + 512).reduce((a, b) => a + b, 0);
          bytes.write(`${sum.toString(8).padStart(6, '0')}\0 `, at + 148, 'latin1');
        }
      }
      writeFileSync(path, bytes);
      const result = await indexTar(path).catch((error: unknown) => error);
      if (!(result instanceof Map)) expect(isDsecError(result, 'SOURCE_ARCHIVE'), String(result)).toBe(true);
      else for (const m of result.values()) expect(m.offset + m.sizeBytes).toBeLessThanOrEqual(bytes.length);
    }
  });
});
