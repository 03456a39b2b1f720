/** What `dsec run` would start a sandbox with on this machine, and whether the runtime service would do it. */
import { isDsecError, messageOf } from '#base';
import type { Feature } from '#linux';
import { agentState, chooseBackend, runtimeFolders } from '#runtime';
import { serviceState } from '../runtime-service/service-state.ts';

export function runtimeRows(): Feature[] {
  const agent = agentState();
  const service = serviceState(runtimeFolders().runDir);
  const built = agent.state === 'ready';
  return [
    {
      name: 'dsec-agent',
      present: built,
      detail: agent.state === 'stale' ? 'built from other sources: node scripts/setup.mjs' : agent.path,
      usedFor: 'starts sandboxes; the client of the runtime service',
      fallback: 'crun or runc',
    },
    { name: 'sandboxes started by', ...chosen(), usedFor: 'dsec run', fallback: 'dsec run fails' },
    {
      name: 'runtime service',
      present: service.listens,
      detail: service.socket,
      usedFor: 'dsec run of root starts at once',
      fallback: 'each dsec run loads itself; start it with: dsec serve runtime',
    },
  ];
}

function chosen(): { present: boolean; detail: string } {
  try {
    return { present: true, detail: chooseBackend(runtimeFolders().runDir).name };
  } catch (error) {
    return { present: false, detail: isDsecError(error) ? (error.hint ?? error.message) : messageOf(error) };
  }
}
