/**
 * The token that services of a cluster show each other: from a file, else from $DSEC_CLUSTER_TOKEN. Whoever has it may do everything on every
 * edge, so it comes on no command line and stands in no log.
 */
import { createHash, timingSafeEqual } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { messageOf } from '#base';
import { fail } from '../errors.ts';

const TOKEN = /^[\x21-\x7e]{16,512}$/;

/** Undefined: there is none. @throws SERVICE_TOKEN_FILE */
export function clusterToken(file?: string, env: NodeJS.ProcessEnv = process.env): string | undefined {
  if (file === undefined) {
    const given = env.DSEC_CLUSTER_TOKEN;
    return given === undefined || given === '' ? undefined : checked(given, '$DSEC_CLUSTER_TOKEN');
  }
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    throw fail('SERVICE_TOKEN_FILE', { file, problem: messageOf(error) }, error);
  }
  return checked(text.trim(), file);
}

function checked(token: string, file: string): string {
  if (TOKEN.test(token)) return token;
  throw fail('SERVICE_TOKEN_FILE', { file, problem: 'a token has 16 to 512 printable characters, and no blanks' });
}

/** Whether an Authorization header shows this token, in a time that tells nothing of it. */
export function tokenCheck(token: string): (authorization: string | undefined) => boolean {
  const digest = (text: string) => createHash('sha256').update(text).digest();
  const expected = digest(`Bearer ${token}`);
  return (authorization) =>
    authorization !== undefined && authorization.length < 1024 && timingSafeEqual(digest(authorization), expected);
}
