/** Whether tasks (FnCall) can run here, and which graphics processors there are. */
import { messageOf } from '#base';
import type { Feature } from '#linux';
import { agentState, listGpus } from '#runtime';

const USED_FOR = 'dsec fncall, dsec serve fncall';

export async function fncallRows(): Promise<Feature[]> {
  const { state } = agentState();
  const present = state === 'ready' && process.geteuid?.() === 0;
  const detail =
    state !== 'ready'
      ? `dsec-agent is ${state}: node scripts/setup.mjs`
      : present
        ? 'by our own launcher'
        : 'only root can';
  const gpus = await listGpus().then(
    (found) => ({
      present: found.length > 0,
      detail:
        found.length === 0 ? 'no nvidia-smi, or no card' : found.map(({ name, profile }) => profile ?? name).join(', '),
    }),
    (error: unknown) => ({ present: false, detail: messageOf(error) }),
  );
  return [
    { name: 'fncall', present, detail, usedFor: USED_FOR, fallback: 'dsec run, one container a task' },
    {
      name: 'gpu',
      ...gpus,
      usedFor: 'tasks on graphics processors',
      fallback: 'tasks on processors alone',
      later: true,
    },
  ];
}
