/** Whether networks with a policy can be tried here. */
import { execFileSync } from 'node:child_process';
import { findAgent } from '../backend/agent-binary.ts';

export function hasNetworkTools(): boolean {
  if (process.getuid?.() !== 0 || findAgent() === undefined) {
    console.log('skipped: needs root and the agent');
    return false;
  }
  const missing = ['nft', 'ip', 'nsenter', 'unshare', 'busybox'].filter((tool) => {
    try {
      execFileSync('sh', ['-c', `command -v ${tool}`], { stdio: 'ignore' });
      return false;
    } catch {
      return true;
    }
  });
  if (missing.length > 0) console.log(`skipped: ${missing.join(', ')} not installed`);
  return missing.length === 0;
}
