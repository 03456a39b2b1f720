/** A process of its own that makes a full machine, pauses it, resumes it, ends it: killed at the place that $DSEC_FAILPOINT names. */
import { openDiskImage, openStore } from '#imagesvc';
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
const base = await openDiskImage(store, image);
const machine = await node.create({ backend: 'vm', store, base, name, cpus: 1, memoryBytes: 32 << 20 });
await machine.pause();
await machine.resume();
await machine.stop({ timeMs: 0 });
node.close();
