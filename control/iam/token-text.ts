/**
 * What a token looks like: `dsec_`, 256 random bits and a checksum of them, in base64url. Mistyped and invented ones are told from the text
 * alone, without a question to the database, and scanners for leaked secrets can know one for sure.
 */
import { hash, randomBytes } from 'node:crypto';
import { crc32 } from 'node:zlib';

const PREFIX = 'dsec_';
const FORM = /^dsec_([A-Za-z0-9_-]{43})([A-Za-z0-9_-]{6})$/;
/** The longest text that may be one; nothing longer is looked at. */
const LENGTH = PREFIX.length + 43 + 6;

export function makeToken(): string {
  const random = randomBytes(32).toString('base64url');
  return `${PREFIX}${random}${checksum(random)}`;
}

export function isTokenText(text: string): boolean {
  if (text.length !== LENGTH) return false;
  const match = FORM.exec(text);
  return match !== null && checksum(match[1] as string) === match[2];
}

function checksum(random: string): string {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32BE(crc32(`${PREFIX}${random}`));
  return bytes.toString('base64url');
}

/** What is kept of a token. 256 random bits need no salt and no slow hash. */
export function tokenHash(token: string): string {
  return hash('sha256', token);
}

/** Blacks out whatever might be one, whole or in part. */
export function withoutTokens(text: string): string {
  return text.replace(/dsec_[A-Za-z0-9_-]{20,}/g, 'dsec_...');
}
