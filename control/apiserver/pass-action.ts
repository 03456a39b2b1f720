/** What a caller has to be allowed, for what he asks of one sandbox: by method, and by what follows its id in the path. */
import type { Action } from '../iam/actions.ts';

/** Looking changes nothing; what runs code, writes files or talks to what runs inside is `exec`; all else manages the sandbox. */
const LOOKS: ReadonlySet<string> = new Set([
  '',
  'commands',
  'console',
  'files',
  'network',
  'screen',
  'usage',
  'shells',
]);
const RUNS: ReadonlySet<string> = new Set(['commands', 'console', 'files', 'ports', 'screen', 'shells']);

/** `rest`: the path behind the id, without a slash at its beginning: `commands/3/output`. */
export function actionOf(method: string, rest: string): Action {
  const noun = rest.split('/', 1)[0]!;
  if ((method === 'GET' || method === 'HEAD') && LOOKS.has(noun)) return 'sandbox.read';
  return RUNS.has(noun) ? 'sandbox.exec' : 'sandbox.manage';
}
