/**
 * Some simulated edges in a process of their own, each with a port of its own: real HTTP, real admission, no containers. Started by
 * simulated-edge-process.ts: the order is its argument, as JSON; it prints where they listen as one line of JSON, and ends when its input does.
 */
import { serveSimulatedEdge } from '#control';
import type { SimulatedEdgesOrder } from './simulated-edge-process.ts';

const order = JSON.parse(process.argv[2] ?? '{}') as SimulatedEdgesOrder;
const { names, token, sandboxes, createMs, labels, host = '127.0.0.1' } = order;
const MANY = Number.MAX_SAFE_INTEGER;
const capacity = { cpuMilli: MANY, memoryBytes: MANY, diskBytes: MANY, gpus: 0, ...order.capacity };
const limits = {
  capacity,
  sandboxes: new Map([['container', sandboxes]]),
  memoryReserve: 0,
  diskReserve: 0,
  mostWaiting: { cpu: 1, memory: 1, io: 1 },
};

const serving = await Promise.all(
  names.map((edge) => serveSimulatedEdge({ edge, limits, createMs, labels }, { listen: `${host}:0`, token })),
);
process.stdout.write(`${JSON.stringify(serving.map(({ url }, k) => ({ edge: names[k], url })))}\n`);
// Whoever started it has gone, however.
process.stdin.resume().once('end', () => process.exit(0));
process.stdin.once('error', () => process.exit(0));
