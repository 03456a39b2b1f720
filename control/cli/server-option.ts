/** Options of commands that an image service can do in this one's place. */
import { readFileSync } from 'node:fs';
import type { Command } from 'commander';
import type { ClientOptions } from '#imagesvc';
import { fail } from '../errors.ts';
import { inputError } from './input-error.ts';

export interface ServerOption {
  readonly server?: string;
  readonly token?: string;
  readonly store?: string;
}

export function withServer(command: Command): Command {
  return command
    .option('--server <url>', 'let an image service do it, in its own store: http://HOST:PORT, https://..., unix:/path')
    .option('--token <token>', 'for the image service; @FILE reads it from a file (default: $DSEC_TOKEN)');
}

/** Undefined: it is done here. @throws CLI_USAGE, CLI_INPUT_* */
export function serverOf({ server, token, store }: ServerOption): ClientOptions | undefined {
  if (server === undefined) {
    if (token === undefined) return undefined;
    throw fail('CLI_USAGE', { problem: '--token is for --server', program: 'dsec convert' });
  }
  if (store !== undefined) {
    throw fail('CLI_USAGE', {
      problem: 'the image service has its own store: leave --store out',
      program: 'dsec convert',
    });
  }
  return { url: server, token: tokenIn(token ?? process.env.DSEC_TOKEN) };
}

function tokenIn(text: string | undefined): string | undefined {
  if (text === undefined || text === '') return undefined;
  if (!text.startsWith('@')) return text;
  const path = text.slice(1);
  try {
    return readFileSync(path, 'utf8').trim();
  } catch (error) {
    throw inputError(path, error);
  }
}
