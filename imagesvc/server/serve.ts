/** `dsec serve imagesvc`: the service on an address, until it is told to stop. */
import type { Digest } from '#base';
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { listen, parseListenAddress } from './listen.ts';
import { type Caller, Tokens } from './tokens.ts';

export interface ServeOptions {
  readonly store: BlobStore;
  /** `HOST:PORT` or `unix:/path`. */
  readonly listen: string;
  readonly stateDir: string;
  readonly version: string;
  readonly tokenFile?: string;
  /** One token in the clear, from the environment. */
  readonly token?: string;
  readonly allowedPaths?: readonly string[];
  /** Jobs that run at once. */
  readonly concurrency?: number;
  /** Jobs of one caller. */
  readonly jobsPerCaller?: number;
  readonly logLevel?: string;
  /** See ImageServiceOptions. */
  readonly moreInUse?: () => Promise<ReadonlySet<Digest>>;
}

export interface Serving {
  /** `http://HOST:PORT` or `unix:/path` */
  readonly url: string;
  /** Reads the token file again; an error is logged, and the old tokens stay. */
  reloadTokens(): void;
  close(graceMs?: number): Promise<void>;
}

/** @throws SERVER_LISTEN, SERVER_LISTEN_OPEN, SERVER_TOKEN_FILE, SERVER_STATE_BUSY */
export async function serveImages(options: ServeOptions): Promise<Serving> {
  // Only who serves pays for loading it.
  const { createImageService, logTo } = await import('./app.ts');
  const address = parseListenAddress(options.listen);
  const tokens = new Tokens({ file: options.tokenFile, environment: options.token });
  if (tokens.none && address.kind === 'tcp' && !address.loopback) {
    throw fail('SERVER_LISTEN_OPEN', { address: options.listen });
  }
  const logger = logTo(2, options.logLevel ?? 'info');
  // Whoever may open a socket file of this user may do what this user may. A port on loopback is open to all users.
  const openCaller: Caller = { name: 'local', role: address.kind === 'unix' ? 'admin' : 'write' };
  const service = await createImageService({
    store: options.store,
    stateDir: options.stateDir,
    version: options.version,
    logger,
    tokens,
    openCaller,
    hostNames: address.kind === 'tcp' ? ['localhost', '127.0.0.1', '[::1]', address.host] : undefined,
    allowedPaths: options.allowedPaths,
    moreInUse: options.moreInUse,
    limits: { concurrency: options.concurrency, jobsPerCaller: options.jobsPerCaller },
  });
  try {
    const url = await listen(service.app, address);
    if (tokens.none) logger.warn({ role: openCaller.role }, 'no tokens: everybody who can connect is let in');
    return {
      url,
      reloadTokens() {
        try {
          tokens.reload();
          logger.info('tokens were read again');
        } catch (error) {
          logger.error({ err: error }, 'tokens stay as they were');
        }
      },
      close: (graceMs) => service.close(graceMs),
    };
  } catch (error) {
    await service.close(0);
    throw error;
  }
}
