/** A process of its own that creates a sandbox that stays, runs commands in it, pauses it, resumes it, looks at its changes, stops it: killed at the place that $DSEC_FAILPOINT names. */
import { openImage, openStore } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { type AllLimits, type CreateOptions, type RuntimeFolders, SandboxNode } from '../index.ts';

const { storeUrl, image, name, folders, remove, limits, options, vmPool } = JSON.parse(process.argv[2]!) as {
  readonly storeUrl: string;
  readonly image: string;
  readonly name: string;
  readonly folders: RuntimeFolders;
  /** Instead of being stopped. */
  readonly remove: boolean;
  /** Changed by it, too. */
  readonly limits?: AllLimits;
  readonly options?: Partial<CreateOptions>;
  readonly vmPool?: boolean;
};
const store = await openStore(storeUrl);
const node = await SandboxNode.open({ agent: findAgent()!, folders, vmPool });
const sandbox = await node.create({ store, base: await openImage(store, image), name, ...limits, ...options });
if (limits !== undefined) await sandbox.update({ pids: 77 });
await (await sandbox.exec({ args: ['true'] })).wait();
await sandbox.exec({ args: ['sleep', '1000'], background: true });
await sandbox.pause();
await sandbox.resume();
await sandbox.whileStill(async ({ done }) => done());
if (remove) await node.remove(name, { force: true });
else await sandbox.stop();
node.close();
