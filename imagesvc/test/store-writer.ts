/** See store-writer.mjs. */
import { createHash } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, digestOf, isDsecError } from '#base';
import { publishImage } from '../catalog/catalog.ts';
import { chunkDigestsSize } from '../catalog/manifest.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';

const [mode, url, seed = '0'] = process.argv.slice(2) as [string, string, string?];
const store = await openStore(url);

function content(text: string, sizeBytes: number): Buffer {
  return createHash('shake256', { outputLength: sizeBytes }).update(text).digest();
}

/** One made-up image: a metadata image, a data blob with its chunk digests, and a config, published as a converter does. */
async function publish(into: BlobStore, name: string, text: string): Promise<void> {
  const staging = await into.stage();
  try {
    const put = async (label: string, bytes: Buffer): Promise<Descriptor> => {
      const path = join(staging.path, label);
      writeFileSync(path, bytes);
      const digest = digestOf(bytes);
      await into.putFile(path, digest, bytes.length);
      return { mediaType: '', digest, size: bytes.length };
    };
    const data = content(`${text} data`, 600_000);
    const layers = [
      {
        meta: await put('meta', content(`${text} meta`, 8192)),
        devices: [
          {
            blob: await put('data', data),
            chunkDigests: await put('chunks', content(`${text} chunks`, chunkDigestsSize(data.length))),
          },
        ],
      },
    ];
    await publishImage(into, {
      name,
      kind: 'base',
      layers,
      config: Buffer.from(JSON.stringify({ os: 'linux', text })),
    });
  } finally {
    await staging.remove();
  }
}

async function codeOf(work: Promise<unknown>): Promise<string> {
  try {
    await work;
    return 'done';
  } catch (error) {
    return isDsecError(error) ? error.code : String(error);
  }
}

if (mode === 'same') {
  for (let i = 0; i < 3; i++) {
    await store.put(content(`blob ${i}`, 200_000));
    await publish(store, 'shared/name', 'the same');
  }
} else if (mode === 'forever') {
  process.stdout.write('ready\n');
  for (let i = 0; ; i++) await publish(store, `image/n${i % 5}:s${seed}`, `${seed} ${i}`);
} else if (mode === 'errors') {
  const digest: Digest = digestOf('x');
  console.log('put', await codeOf(store.put(Buffer.from('y'))));
  console.log('stage', await codeOf(store.stage()));
  console.log('setRef', await codeOf(store.setRef({ name: 'a', manifest: { mediaType: 'm', digest, size: 1 } })));
  console.log('read', (await store.readVerified(digest)).toString());
}
