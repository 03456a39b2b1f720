/** Against Debian's docker-registry and skopeo: what they write is read, what is written they read. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { mkdirSync, writeFileSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { gzipSync } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { type Digest, digestOf } from '#base';
import { openSource } from '../source/open-source.ts';
import { hostPlatform } from '../source/platform.ts';
import { RegistryClient } from '../source/registry-client.ts';
import { type Described, expectBytes, failureOf, ImageFixture, OCI, tarOf, Workshop } from './image-fixture.ts';

function has(program: string): boolean {
  try {
    execFileSync('which', [program]);
    return true;
  } catch {
    console.log(`skipped: these tests need ${program}`);
    return false;
  }
}

const ready = has('docker-registry') && has('skopeo');

describe.skipIf(!ready)('a real registry', () => {
  const work = new Workshop();
  let server: ChildProcess;
  let host: string;
  let client: RegistryClient;

  const skopeo = (...args: string[]) => execFileSync('skopeo', args, { stdio: ['ignore', 'pipe', 'pipe'] }).toString();
  const tar = (bytes: Buffer) => tarOf([{ name: 'file', content: bytes }]);

  beforeAll(async () => {
    const probe = createServer();
    await new Promise<void>((done) => probe.listen(0, '127.0.0.1', done));
    const { port } = probe.address() as AddressInfo;
    await new Promise((done) => probe.close(done));
    host = `127.0.0.1:${port}`;
    mkdirSync(join(work.path, 'storage'));
    const config = join(work.path, 'config.yml');
    writeFileSync(
      config,
      [
        'version: 0.1',
        'log: { level: error, accesslog: { disabled: true } }',
        `storage: { filesystem: { rootdirectory: ${join(work.path, 'storage')} }, delete: { enabled: true } }`,
        `http: { addr: "${host}" }`,
        '',
      ].join('\n'),
    );
    server = spawn('docker-registry', ['serve', config], { stdio: 'ignore' });
    client = new RegistryClient({ registry: host, env: { HOME: work.path } });
    for (let tries = 0; ; tries++) {
      try {
        await fetch(`http://${host}/v2/`);
        break;
      } catch (error) {
        if (tries > 200) throw error;
        await sleep(50);
      }
    }
  });

  afterAll(async () => {
    await client?.close();
    const ended = new Promise((done) => server.once('exit', done));
    server.kill();
    await ended;
    work.remove();
  });

  async function all(parts: AsyncIterable<Buffer>): Promise<Buffer> {
    const out: Buffer[] = [];
    for await (const part of parts) out.push(Buffer.from(part));
    return Buffer.concat(out);
  }

  test('what skopeo copied there is read back', async () => {
    const tars = [await tar(randomBytes(2_000_000)), await tar(randomBytes(1000))];
    const fixture = new ImageFixture();
    const manifest = fixture.image(tars, hostPlatform().architecture);
    fixture.name(manifest, 'v1');
    const folder = fixture.write(work.fresh('layout'));
    skopeo('copy', '--dest-tls-verify=false', `oci:${folder}:v1`, `docker://${host}/team/app:v1`);

    for (const name of ['team/app:v1', `team/app@${manifest.digest}`, `team/app:other@${manifest.digest}`]) {
      const source = await openSource(`docker://${host}/${name}`, {});
      try {
        const image = await source.resolve();
        expect(image.manifestDigest).toBe(manifest.digest);
        expect(image.layers.map((layer) => layer.diffId)).toEqual(tars.map(digestOf));
        for (const [i, layer] of image.layers.entries()) {
          if (layer.input.kind !== 'stream') throw new Error(layer.input.kind);
          expectBytes(await all(layer.input.open(new AbortController().signal)), gzipSync(tars[i]!));
        }
      } finally {
        await source.close();
      }
    }
    const layer = gzipSync(tars[0]!);
    expectBytes(
      await client.readBlobRange('team/app', digestOf(layer), 1_000_000, 12_345),
      layer.subarray(1_000_000, 1_012_345),
    );
    expect(await client.listTags('team/app')).toEqual(['v1']);
    expect((await failureOf(client.getManifest('team/app', 'none'))).message).toContain('MANIFEST_UNKNOWN');
    expect((await failureOf(client.getManifest('team/none', 'v1'))).code).toBe('SOURCE_REGISTRY_NOT_FOUND');
  });

  test('what is pushed skopeo inspects and copies', async () => {
    const bytes = await tar(randomBytes(3_000_000));
    const fixture = new ImageFixture();
    const manifest = fixture.image([bytes], hostPlatform().architecture);
    const send = async (digest: Digest, blob: Buffer) => {
      expect(await client.blobExists('pushed/app', digest)).toBe(false);
      await client.uploadBlob('pushed/app', digest, blob.length, async function* () {
        for (let at = 0; at < blob.length; at += 65_536) yield blob.subarray(at, at + 65_536);
      });
      expect(await client.blobExists('pushed/app', digest)).toBe(true);
    };
    for (const [digest, blob] of fixture.blobs) if (digest !== manifest.digest) await send(digest, blob);
    const document = fixture.blobs.get(manifest.digest)!;
    expect(await client.putManifest('pushed/app', 'v2', document, manifest.mediaType)).toBe(manifest.digest);
    expect(await client.headManifest('pushed/app', 'v2')).toEqual({
      digest: manifest.digest,
      mediaType: manifest.mediaType,
      sizeBytes: document.length,
    });
    const seen = JSON.parse(skopeo('inspect', '--tls-verify=false', `docker://${host}/pushed/app:v2`));
    expect(seen).toMatchObject({ Digest: manifest.digest, RepoTags: ['v2'], Layers: [digestOf(gzipSync(bytes))] });
    skopeo('copy', '--src-tls-verify=false', `docker://${host}/pushed/app:v2`, `oci:${work.fresh('back')}:v2`);

    const layer = digestOf(gzipSync(bytes));
    expect(await client.mountBlob('other/app', layer, 'pushed/app')).toBe(true);
    expect(await client.blobExists('other/app', layer)).toBe(true);
    expect(await client.mountBlob('other/app', digestOf('no such blob'), 'pushed/app')).toBe(false);
  });

  test('a wrong digest is refused by the registry, and said so', async () => {
    const error = await failureOf(
      client.uploadBlob('pushed/app', digestOf('right'), 5, async function* () {
        yield Buffer.from('wrong');
      }),
    );
    expect(error.message).toContain('DIGEST_INVALID');
  });

  test('an index: the platform of this machine, and of another', async () => {
    const fixture = new ImageFixture();
    const bytes = await tar(Buffer.from('x'));
    const entries = ['amd64', 'arm64'].map((architecture) => {
      const d: Described = fixture.image([bytes], architecture);
      return { ...d, platform: { os: 'linux', architecture } };
    });
    fixture.name(fixture.json({ schemaVersion: 2, manifests: entries }, `${OCI}.index.v1+json`), 'v1');
    const folder = fixture.write(work.fresh('layout'));
    skopeo('copy', '--all', '--dest-tls-verify=false', `oci:${folder}:v1`, `docker://${host}/multi:v1`);
    for (const { digest, platform } of entries) {
      const source = await openSource(`docker://${host}/multi:v1`, { platform });
      expect((await source.resolve()).manifestDigest).toBe(digest);
      await source.close();
    }
  });

  test('archives that skopeo writes', async () => {
    const tars = [await tar(randomBytes(100_000)), await tar(Buffer.from('2'))];
    const fixture = new ImageFixture();
    const manifest = fixture.image(tars, hostPlatform().architecture);
    fixture.name(manifest, 'v1');
    const folder = fixture.write(work.fresh('layout'));
    const [docker, oci] = [work.fresh('docker.tar'), work.fresh('oci.tar')];
    skopeo('copy', `oci:${folder}:v1`, `docker-archive:${docker}:app:v1`);
    skopeo('copy', `oci:${folder}:v1`, `oci-archive:${oci}:v1`);
    for (const reference of [`docker-archive:${docker}:app:v1`, `docker-archive:${docker}`, `oci-archive:${oci}:v1`]) {
      const source = await openSource(reference, {});
      const image = await source.resolve();
      expect(image.layers.map((layer) => layer.diffId)).toEqual(tars.map(digestOf));
      await source.close();
    }
  });
});
