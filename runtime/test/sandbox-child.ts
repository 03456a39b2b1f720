/** A process of its own for the sandbox tests: runs what its argument says with its own standard streams, exits as it did. */
import { isDsecError } from '#base';
import { openImage, openStore } from '#imagesvc';
import { runContainer } from '../index.ts';
import type { ChildOrder } from './sandbox-fixture.ts';

const { storeUrl, image, ...options } = JSON.parse(process.argv[2]!) as ChildOrder;
const store = await openStore(storeUrl);
try {
  const result = await runContainer({ ...options, store, base: await openImage(store, image) });
  process.exitCode = result.exitCode;
} catch (error) {
  process.stderr.write(`${isDsecError(error) ? `${error.code}: ${error.message}` : String(error)}\n`);
  process.exitCode = isDsecError(error) ? error.exit : 1;
}
