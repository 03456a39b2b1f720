/** So that nobody locks everybody out: the last who may do everything is neither disabled nor deprived. */
import { ACTIONS, actionsOf } from './actions.ts';
import type { Transaction } from './database/database.ts';
import { ROOT } from './project-path.ts';

/** Whether somebody could still give everything to others. */
export async function hasLastingAdmin(rows: Transaction['rows']): Promise<boolean> {
  const found = await rows<{ grants: string }>(
    `SELECT o.grants FROM iam_policies o JOIN iam_principals p ON p.name = o.principal
     WHERE o.project = ? AND o.expires_at IS NULL AND p.disabled = 0`,
    ROOT,
  );
  return found.some(({ grants }) => {
    const actions = actionsOf(JSON.parse(grants) as string[]);
    return ACTIONS.every((action) => actions.has(action));
  });
}
