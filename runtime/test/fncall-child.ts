/** A process with a pool that is at work, to be killed. */
import { openImage, openStore } from '#imagesvc';
import { FnCallNode, type RuntimeFolders } from '../index.ts';

const { storeUrl, image, folders } = JSON.parse(process.argv[2]!) as {
  storeUrl: string;
  image: string;
  folders: RuntimeFolders;
};
const store = await openStore(storeUrl);
const node = new FnCallNode({ folders, note: (text) => console.error(text) });
const pool = node.poolFor({ store, base: await openImage(store, image) }, { floor: 2, ceiling: 2, python: {} });
await pool.warm();
node.run(pool, { language: 'sh', code: 'sleep 1000', limits: { wallMs: 500_000 } });
while (pool.state.busy === 0) await new Promise((resolve) => setTimeout(resolve, 10));
console.log('at work');
