/** See store-writer.mjs. */
import { digestOf, isDsecError } from '#base';
import { openStore } from '../store/open-store.ts';
import { noise, publishMadeUp } from './made-up-image.ts';

const [mode, url, seed = '0'] = process.argv.slice(2) as [string, string, string?];
const store = await openStore(url);

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
    await store.put(noise(`blob ${i}`, 200_000));
    await publishMadeUp(store, 'shared/name', { layers: ['the same'] });
  }
} else if (mode === 'forever') {
  process.stdout.write('ready\n');
  for (let i = 0; ; i++) await publishMadeUp(store, `image/n${i % 5}:s${seed}`, { layers: ['shared', `${seed} ${i}`] });
} else if (mode === 'errors') {
  const digest = digestOf('x');
  console.log('put', await codeOf(store.put(Buffer.from('y'))));
  console.log('stage', await codeOf(store.stage()));
  console.log('setRef', await codeOf(store.setRef({ name: 'a', manifest: { mediaType: 'm', digest, size: 1 } })));
  console.log('read', (await store.readVerified(digest)).toString());
}
