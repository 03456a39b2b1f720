/** A process of its own that creates a sandbox that stays, runs a command in it, stops it: killed at the place that $DSEC_FAILPOINT names. */
import { openImage, openStore } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { type RuntimeFolders, SandboxNode } from '../index.ts';

const { storeUrl, image, name, folders } = JSON.parse(process.argv[2]!) as {
  readonly storeUrl: string;
  readonly image: string;
  readonly name: string;
  readonly folders: RuntimeFolders;
};
const store = await openStore(storeUrl);
const node = await SandboxNode.open({ agent: findAgent()!, folders });
const sandbox = await node.create({ store, base: await openImage(store, image), name });
await (await sandbox.exec({ args: ['true'] })).wait();
await sandbox.stop();
node.close();
