/** What the services of the cluster have in common on the command line, and how each runs until it is told to end. */
import type { Command } from 'commander';
import { fail } from '../errors.ts';
import { type ClusterToken, clusterToken } from '../service-base/cluster-token.ts';
import type { ClientTlsFiles, ServerTlsFiles } from '../service-base/tls-files.ts';
import { choice } from './choice.ts';
import type { Context } from './context.ts';
import { parseDuration } from './duration.ts';
import { endWithSupervisor } from './supervised.ts';

export const LEVELS = ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'] as const;

export interface ServiceOptionValues {
  readonly listen: string;
  readonly tlsCert?: string;
  readonly tlsKey?: string;
  readonly tlsClientCa?: string;
  readonly clusterTokenFile?: string;
  readonly clusterCa?: string;
  readonly clusterCert?: string;
  readonly clusterKey?: string;
  readonly drain: string;
  readonly logLevel: string;
}

export function withServiceOptions(command: Command, defaults: { readonly listen: string }): Command {
  return command
    .option('--listen <address>', 'HOST:PORT or unix:/path', defaults.listen)
    .option('--tls-cert <file>', 'serve TLS with this certificate (PEM, with what is between it and its authority)')
    .option('--tls-key <file>', 'the key of --tls-cert')
    .option('--tls-client-ca <file>', 'take only clients with a certificate of this authority (mutual TLS)')
    .option('--cluster-token-file <file>', 'the token that services show each other (default: $DSEC_CLUSTER_TOKEN)')
    .option('--cluster-ca <file>', 'the authority of the other services’ certificates (default: those of this system)')
    .option('--cluster-cert <file>', 'the certificate to show to other services that want one')
    .option('--cluster-key <file>', 'the key of --cluster-cert')
    .option('--drain <time>', 'how long what is being answered may go on after SIGTERM', '10s')
    .option('--log-level <level>', `of the log on stderr: ${LEVELS.join(', ')}`, 'info');
}

export interface ServiceSettings {
  readonly listen: string;
  readonly tls: ServerTlsFiles | undefined;
  readonly token: ClusterToken | undefined;
  /** For connections to other services. */
  readonly peerTls: ClientTlsFiles;
  readonly drainMs: number;
  readonly logLevel: string;
}

/** @throws CLI_USAGE, CLI_DURATION, SERVICE_TOKEN_FILE */
export function serviceSettings(options: ServiceOptionValues, program: string): ServiceSettings {
  const { listen, tlsCert: certFile, tlsKey: keyFile, tlsClientCa: clientCaFile } = options;
  const { clusterCa: caFile, clusterCert, clusterKey } = options;
  const usage = (problem: string) => fail('CLI_USAGE', { problem, program });
  if ((certFile === undefined) !== (keyFile === undefined)) throw usage('--tls-cert and --tls-key go together');
  if (clientCaFile !== undefined && certFile === undefined)
    throw usage('--tls-client-ca needs --tls-cert and --tls-key');
  if ((clusterCert === undefined) !== (clusterKey === undefined)) {
    throw usage('--cluster-cert and --cluster-key go together');
  }
  return {
    listen,
    tls: certFile === undefined || keyFile === undefined ? undefined : { certFile, keyFile, clientCaFile },
    token: clusterToken(options.clusterTokenFile),
    peerTls: { caFile, certFile: clusterCert, keyFile: clusterKey },
    drainMs: parseDuration('--drain', options.drain),
    logLevel: choice('--log-level', options.logLevel, LEVELS),
  };
}

/**
 * Serves until SIGTERM or SIGINT, which has `drainMs`; the second one does not wait. SIGHUP reads anew what can be.
 * However the command ends, `close(0)` is called.
 */
export async function serveUntilSignal(
  { output, takeSignals, defer }: Context,
  service: { close(drainMs: number): Promise<void>; reload?(): void },
  { line, drainMs }: { readonly line: string; readonly drainMs: number },
): Promise<void> {
  let closing: Promise<void> | undefined;
  const close = (ms: number) => {
    closing ??= service.close(ms);
    return closing;
  };
  defer(() => close(0));
  endWithSupervisor();
  await new Promise<void>((done) => {
    takeSignals((signal) => {
      if (signal === 'SIGHUP' && service.reload !== undefined) {
        try {
          service.reload();
        } catch (error) {
          output.note(`dsec: ${signal}: ${(error as Error).message}; what was before holds on`);
        }
        return;
      }
      if (closing !== undefined) return done();
      output.note(`dsec: ${signal}: ending`);
      close(drainMs).then(done, done);
    });
    output.line(line);
  });
}
