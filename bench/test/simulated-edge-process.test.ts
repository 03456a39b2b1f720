/** Processes of simulated edges: they listen, they answer, and they end with whoever started them. */
import { expect, it } from 'vitest';
import { PeerClient } from '#control';
import { startSimulatedEdges } from '../simulated-edge-process.ts';

it('starts edges in several processes', async () => {
  const token = 'the-token-of-a-test-cluster';
  const started = await startSimulatedEdges({ names: ['sim-0', 'sim-1', 'sim-2'], token, sandboxes: 10 }, 2);
  try {
    expect(started.edges.map(({ edge }) => edge).sort()).toEqual(['sim-0', 'sim-1', 'sim-2']);
    for (const { edge, url } of started.edges) {
      const client = new PeerClient({ url, token });
      expect(await client.json({ method: 'POST', path: '/v1/sandboxes', body: { image: 'x' } })).toMatchObject({
        edge,
      });
      await client.close();
    }
    expect(started.usage().residentBytes).toBeGreaterThan(0);
  } finally {
    await started.close();
  }
  for (const pid of started.pids) expect(() => process.kill(pid, 0)).toThrow();
});
