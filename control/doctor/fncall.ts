/** Whether tasks (FnCall) can run here, and which graphics processors there are. */
import { messageOf } from '#base';
import type { Feature } from '#linux';
import { agentState, type Gpu, listGpus, MACHINE_GPUS } from '#runtime';

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
  const gpus = await listGpus().then(gpuState, (error: unknown) => ({ present: false, detail: messageOf(error) }));
  return [
    { name: 'fncall', present, detail, usedFor: USED_FOR, fallback: 'dsec run, one container a task' },
    {
      name: 'gpu',
      ...gpus,
      usedFor: 'dsec fncall pool --gpu',
      fallback: 'tasks on processors alone; a pool with --gpu is refused',
    },
  ];
}

/** Whether their device nodes are there, too: nvidia-smi makes do with fewer. */
function gpuState(gpus: readonly Gpu[]): Pick<Feature, 'present' | 'detail'> {
  if (gpus.length === 0) return { present: false, detail: 'no nvidia-smi, or no card' };
  try {
    for (const gpu of gpus) MACHINE_GPUS.devices(gpu);
  } catch (error) {
    return { present: false, detail: messageOf(error) };
  }
  return { present: true, detail: gpus.map(({ name, profile }) => profile ?? name).join(', ') };
}
