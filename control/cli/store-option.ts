/** Options that many commands share: the store they work on, and JSON output. */
import type { Command } from 'commander';
import { type BlobStore, defaultStoreUrl, openStore } from '#imagesvc';

export interface StoreOption {
  readonly store?: string;
}

export interface JsonOption {
  readonly json?: boolean;
}

export function withStore(command: Command): Command {
  return command.option(
    '--store <url>',
    'the store: a path, file:///path, s3://bucket/prefix or docker://host/repository (default: $DSEC_STORE, else that of this user)',
  );
}

export function withJson(command: Command): Command {
  return command.option('--json', 'print JSON');
}

/** `--store`, else $DSEC_STORE, else the default of this user. */
export function openChosenStore(options: StoreOption, how: { readonly sync?: boolean } = {}): Promise<BlobStore> {
  return openStore(options.store ?? defaultStoreUrl(), how);
}
