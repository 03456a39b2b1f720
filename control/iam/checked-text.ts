/** Texts from outside that go into the database: short, and nothing in them that one of the databases does not take. */
import { fail } from '../errors.ts';
import { withoutTokens } from './token-text.ts';

const NOT_TEXT = /[\u0000-\u001f\u007f]|\p{Surrogate}/u;
const ID = /^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}$/;

/** @throws IAM_BAD_REQUEST */
export function checkText(what: string, text: string, longest = 256): string {
  if (typeof text !== 'string' || text.length === 0 || text.length > longest) {
    throw fail('IAM_BAD_REQUEST', { problem: `${what}: 1 to ${longest} characters` });
  }
  if (NOT_TEXT.test(text)) {
    throw fail('IAM_BAD_REQUEST', { problem: `${what}: it holds a control character or half of one` });
  }
  // Whoever pastes one in the wrong place shall not have it kept.
  if (withoutTokens(text) !== text) throw fail('IAM_BAD_REQUEST', { problem: `${what}: it holds a token` });
  return text;
}

/** @throws IAM_BAD_REQUEST */
export function checkName(what: string, name: string): string {
  if (typeof name !== 'string' || !ID.test(name) || withoutTokens(name) !== name) {
    const problem = `${what}: 1 to 100 of letters, digits, ".", "_", "@", "+", "-", and it begins with a letter or digit`;
    throw fail('IAM_BAD_REQUEST', { problem });
  }
  return name;
}

/** For messages. */
export function shownText(text: string): string {
  const cut = text.length > 80 ? `${text.slice(0, 80)}...` : text;
  return JSON.stringify(withoutTokens(cut));
}
