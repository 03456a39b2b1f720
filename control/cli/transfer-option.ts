/** Options of commands that talk to a registry. */
import type { Command } from 'commander';

export interface TransferOption {
  readonly creds?: string;
  readonly insecure?: boolean;
}

export function withTransfer(command: Command): Command {
  return command
    .option('--creds <user:password>', 'for the registry (default: ~/.docker/config.json and its helpers)')
    .option(
      '--insecure',
      'plain HTTP, or TLS without checking certificates; registries on loopback need it for neither',
    );
}

export interface TracesOption {
  readonly traces: boolean;
}

export function withTraces(command: Command): Command {
  return command.option('--no-traces', 'the image alone, without the traces of its starts');
}
