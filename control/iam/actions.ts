/**
 * What a caller may be allowed to do, and the roles that name sets of it. A grant (of a policy or a token) is an action or a role;
 * roles are spelled out when they are used, so an action that a later version brings belongs to `admin` at once.
 */
import { fail } from '../errors.ts';
import { shownText } from './checked-text.ts';

export const ACTIONS = [
  'sandbox.create',
  'sandbox.read',
  'sandbox.exec',
  'sandbox.manage',
  /** Makes sandboxes that share their machine's network or users. */
  'sandbox.host',
  'node.read',
  'node.drain',
  'image.read',
  'project.read',
  'project.admin',
  'token.admin',
  'quota.admin',
  'policy.admin',
  'audit.read',
] as const;
export type Action = (typeof ACTIONS)[number];

const READ = ['sandbox.read', 'node.read', 'image.read', 'project.read'] as const;

/** A role has no dot in its name, an action has one. */
export const ROLES: Readonly<Record<string, readonly Action[]>> = {
  reader: READ,
  developer: [...READ, 'sandbox.create', 'sandbox.exec', 'sandbox.manage'],
  operator: [...READ, 'sandbox.manage', 'node.drain', 'audit.read'],
  admin: ACTIONS,
};

/** @throws IAM_BAD_REQUEST for what is neither an action nor a role */
export function actionsOf(grants: readonly string[]): ReadonlySet<Action> {
  const actions = new Set<Action>();
  for (const grant of grants) {
    const role = Object.hasOwn(ROLES, grant) ? ROLES[grant] : undefined;
    if (role !== undefined) for (const action of role) actions.add(action);
    else if ((ACTIONS as readonly string[]).includes(grant)) actions.add(grant as Action);
    else {
      const known = [...Object.keys(ROLES), ...ACTIONS].join(', ');
      throw fail('IAM_BAD_REQUEST', { problem: `${shownText(grant)} is neither a role nor an action: ${known}` });
    }
  }
  return actions;
}
