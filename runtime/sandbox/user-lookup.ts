/**
 * Who a command runs as: `name`, `uid`, `name:group` or `uid:gid`, looked up in the image's own /etc/passwd and
 * /etc/group. A name is tried before a number; a number needs no entry. With a group given there are no others; without
 * one the user's primary group and every group that lists the user hold.
 */
import { fail } from '../errors.ts';
import { readFileInRoot } from './root-path.ts';

export interface ImageUser {
  readonly uid: number;
  readonly gid: number;
  readonly additionalGids: readonly number[];
  readonly home: string;
}

interface PasswdRow {
  readonly name: string;
  readonly uid: number;
  readonly gid: number;
  readonly home: string;
}

interface GroupRow {
  readonly name: string;
  readonly gid: number;
  readonly members: readonly string[];
}

/** A directory service's export has megabytes; more is not an account file. */
const ACCOUNT_FILE_BYTES = 32 * 1024 * 1024;
/** 2^32 - 1 means "unchanged" to the kernel. */
const MAX_ID = 0xfffffffe;

/** @throws RUNTIME_USER */
export function lookUpUser(root: string, spec: string): ImageUser {
  return userFrom(readAccounts(root, '/etc/passwd'), readAccounts(root, '/etc/group'), spec);
}

/** From the text of both files. @throws RUNTIME_USER */
export function userFrom(passwdText: string, groupText: string, spec: string): ImageUser {
  const colon = spec.indexOf(':');
  const userText = colon < 0 ? spec : spec.slice(0, colon);
  const groupName = colon < 0 ? undefined : spec.slice(colon + 1);
  if (groupName === '' || (userText === '' && groupName !== undefined)) {
    throw fail('RUNTIME_USER', { user: spec, problem: 'write USER or USER:GROUP' });
  }
  const passwd = parsePasswd(passwdText);
  const byName = userText === '' ? undefined : passwd.find((row) => row.name === userText);
  const uid = byName?.uid ?? (userText === '' ? 0 : parseId(userText));
  if (uid === undefined) {
    throw fail('RUNTIME_USER', { user: spec, problem: `no user "${userText}" in /etc/passwd of the image` });
  }
  const row = byName ?? passwd.find((candidate) => candidate.uid === uid);
  const home = row?.home === undefined || row.home === '' ? '/' : row.home;
  const groups = parseGroup(groupText);
  if (groupName !== undefined) {
    const gid = groups.find((group) => group.name === groupName)?.gid ?? parseId(groupName);
    if (gid === undefined) {
      throw fail('RUNTIME_USER', { user: spec, problem: `no group "${groupName}" in /etc/group of the image` });
    }
    return { uid, gid, additionalGids: [], home };
  }
  const gid = row?.gid ?? 0;
  const listed =
    row === undefined ? [] : groups.filter((group) => group.members.includes(row.name)).map((group) => group.gid);
  return { uid, gid, additionalGids: [...new Set(listed)].filter((id) => id !== gid), home };
}

function readAccounts(root: string, path: string): string {
  return readFileInRoot(root, path, ACCOUNT_FILE_BYTES)?.toString('utf8') ?? '';
}

function parsePasswd(text: string): PasswdRow[] {
  const rows: PasswdRow[] = [];
  for (const line of text.split('\n')) {
    const [name, , uidText, gidText, , home] = line.split(':');
    const uid = parseId(uidText);
    const gid = parseId(gidText);
    if (name === undefined || name === '' || uid === undefined || gid === undefined) continue;
    rows.push({ name, uid, gid, home: home ?? '' });
  }
  return rows;
}

function parseGroup(text: string): GroupRow[] {
  const rows: GroupRow[] = [];
  for (const line of text.split('\n')) {
    const [name, , gidText, members] = line.split(':');
    const gid = parseId(gidText);
    if (name === undefined || name === '' || gid === undefined) continue;
    rows.push({ name, gid, members: (members ?? '').split(',').map((member) => member.trim()) });
  }
  return rows;
}

function parseId(text: string | undefined): number | undefined {
  if (text === undefined || !/^[0-9]{1,10}$/.test(text)) return undefined;
  const id = Number(text);
  return id <= MAX_ID ? id : undefined;
}
