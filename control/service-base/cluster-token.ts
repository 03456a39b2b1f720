/**
 * The tokens that services of a cluster show each other: from a file, else from $DSEC_CLUSTER_TOKEN. Whoever has one may do everything on every
 * edge, so it comes on no command line and stands in no log.
 *
 * The first line of the file is what is shown; those below it are taken as well. So a token is replaced while everything runs: the new one is added below
 * everywhere, then above, then the old one is left out, with a SIGHUP each time.
 */
import { createHash, timingSafeEqual } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { messageOf } from '#base';
import { fail } from '../errors.ts';

const TOKEN = /^[\x21-\x7e]{16,512}$/;
const MOST = 4;

export class ClusterToken {
  private readonly file: string | undefined;
  private tokens: readonly string[] = [];
  private digests: readonly Buffer[] = [];

  /** Without a file there is one for good. @throws SERVICE_TOKEN_FILE */
  constructor(from: { readonly file: string } | { readonly token: string }) {
    this.file = 'file' in from ? from.file : undefined;
    if ('token' in from) this.take([from.token]);
    else this.reload();
  }

  get shown(): string {
    return this.tokens[0]!;
  }

  /** Whether an Authorization header shows one of them, in a time that tells nothing of them. */
  accepts(authorization: string | undefined): boolean {
    if (authorization === undefined || authorization.length >= 1024) return false;
    const given = digest(authorization);
    let found = false;
    for (const expected of this.digests) if (timingSafeEqual(given, expected)) found = true;
    return found;
  }

  /** @throws SERVICE_TOKEN_FILE; then what was before holds on */
  reload(): void {
    const { file } = this;
    if (file === undefined) return;
    let text: string;
    try {
      text = readFileSync(file, 'utf8');
    } catch (error) {
      throw fail('SERVICE_TOKEN_FILE', { file, problem: messageOf(error) }, error);
    }
    const lines = text
      .split('\n')
      .map((line) => line.trim())
      .filter((line) => line !== '');
    if (lines.length > MOST) throw fail('SERVICE_TOKEN_FILE', { file, problem: `more than ${MOST} tokens` });
    this.take((lines.length === 0 ? [''] : lines).map((line) => checked(line, file)));
  }

  private take(tokens: readonly string[]): void {
    this.tokens = tokens;
    this.digests = tokens.map((token) => digest(`Bearer ${token}`));
  }
}

/** Undefined: there is none. @throws SERVICE_TOKEN_FILE */
export function clusterToken(file?: string, env: NodeJS.ProcessEnv = process.env): ClusterToken | undefined {
  if (file !== undefined) return new ClusterToken({ file });
  const given = env.DSEC_CLUSTER_TOKEN;
  if (given === undefined || given === '') return undefined;
  return new ClusterToken({ token: checked(given, '$DSEC_CLUSTER_TOKEN') });
}

/** What is one for good may be given as it is. */
export type TokenGiven = string | ClusterToken | undefined;

export function tokenOf(given: TokenGiven): ClusterToken | undefined {
  return typeof given === 'string' ? new ClusterToken({ token: given }) : given;
}

/** For a request to another service. */
export function authorizationOf(token: ClusterToken | undefined): { readonly authorization?: string } {
  return token === undefined ? {} : { authorization: `Bearer ${token.shown}` };
}

function checked(token: string, file: string): string {
  if (TOKEN.test(token)) return token;
  throw fail('SERVICE_TOKEN_FILE', { file, problem: 'a token has 16 to 512 printable characters, and no blanks' });
}

function digest(text: string): Buffer {
  return createHash('sha256').update(text).digest();
}
