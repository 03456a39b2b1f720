/** A runtime of its own with one sandbox that has a network, which then waits to be killed; or is killed at the place that $DSEC_FAILPOINT names. */
import { openImage, openStore } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { type RuntimeFolders, SandboxNode } from '../index.ts';
import { parsePolicy } from '../network/policy.ts';
import type { UpstreamServer } from '../network/resolver/upstream-servers.ts';
import { tcp } from './network-inside.ts';

export interface NetworkChildOrder {
  readonly storeUrl: string;
  readonly image: string;
  readonly name: string;
  readonly folders: RuntimeFolders;
  readonly upstreams: readonly UpstreamServer[];
  readonly policy: unknown;
  /** What it reaches before it waits. */
  readonly reach: readonly (readonly [host: string, port: number])[];
  /** Then it gets this one. */
  readonly next?: unknown;
  /** Then it ends. */
  readonly stop?: boolean;
}

const order = JSON.parse(process.argv[2]!) as NetworkChildOrder;
const { storeUrl, image, name, folders, upstreams, policy, reach, next, stop } = order;
const store = await openStore(storeUrl);
const node = await SandboxNode.open({ agent: findAgent()!, folders, network: { upstreams } });
const network = { mode: 'policy', policy: parsePolicy(policy) } as const;
const sandbox = await node.create({ store, base: await openImage(store, image), name, network });
for (const [host, port] of reach) console.log(await tcp(sandbox, host, port));
if (next !== undefined) await sandbox.network.setPolicy(parsePolicy(next));
if (stop) await sandbox.stop({ timeMs: 0 });
console.log('ready');
setInterval(() => {}, 1000);
