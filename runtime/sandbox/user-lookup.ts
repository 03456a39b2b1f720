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
  /** Of its row, where there is one. */
  readonly name: string | undefined;
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
  /** As they are written: with commas between. */
  readonly members: string;
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
  const number = userText === '' ? 0 : parseId(userText);
  const row = userRow(passwdText, userText, number);
  const uid = row?.uid ?? number;
  if (uid === undefined) {
    throw fail('RUNTIME_USER', { user: spec, problem: `no user "${userText}" in /etc/passwd of the image` });
  }
  const home = row?.home === undefined || row.home === '' ? '/' : row.home;
  if (groupName !== undefined) {
    const gid = gidOf(groupText, groupName) ?? parseId(groupName);
    if (gid === undefined) {
      throw fail('RUNTIME_USER', { user: spec, problem: `no group "${groupName}" in /etc/group of the image` });
    }
    return { uid, gid, additionalGids: [], home, name: row?.name };
  }
  const gid = row?.gid ?? 0;
  const listed = new Set<number>();
  if (row !== undefined) for (const group of groupRows(groupText)) if (lists(group, row.name)) listed.add(group.gid);
  listed.delete(gid);
  return { uid, gid, additionalGids: [...listed], home, name: row?.name };
}

function readAccounts(root: string, path: string): string {
  return readFileInRoot(root, path, ACCOUNT_FILE_BYTES)?.toString('utf8') ?? '';
}

/** The first of this name, else the first of this number. */
function userRow(text: string, name: string, uid: number | undefined): PasswdRow | undefined {
  let byNumber: PasswdRow | undefined;
  for (const row of passwdRows(text)) {
    if (row.name === name) return row;
    if (row.uid === uid) byNumber ??= row;
  }
  return byNumber;
}

function gidOf(text: string, name: string): number | undefined {
  for (const group of groupRows(text)) if (group.name === name) return group.gid;
  return undefined;
}

function lists({ members }: GroupRow, user: string): boolean {
  return members.includes(user) && members.split(',').some((member) => member.trim() === user);
}

function* passwdRows(text: string): Generator<PasswdRow> {
  for (const line of linesOf(text)) {
    const [name, , uidText, gidText, , home] = line.split(':', 6);
    const uid = parseId(uidText);
    const gid = parseId(gidText);
    if (name === undefined || name === '' || uid === undefined || gid === undefined) continue;
    yield { name, uid, gid, home: home ?? '' };
  }
}

function* groupRows(text: string): Generator<GroupRow> {
  for (const line of linesOf(text)) {
    const [name, , gidText, members] = line.split(':', 4);
    const gid = parseId(gidText);
    if (name === undefined || name === '' || gid === undefined) continue;
    yield { name, gid, members: members ?? '' };
  }
}

/** One after the other, without those that are empty: a guest may have written megabytes of them. */
function* linesOf(text: string): Generator<string> {
  for (let at = 0; at < text.length; ) {
    const found = text.indexOf('\n', at);
    const end = found < 0 ? text.length : found;
    if (end > at) yield text.slice(at, end);
    at = end + 1;
  }
}

function parseId(text: string | undefined): number | undefined {
  if (text === undefined || !/^[0-9]{1,10}$/.test(text)) return undefined;
  const id = Number(text);
  return id <= MAX_ID ? id : undefined;
}
