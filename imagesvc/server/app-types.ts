/** What routes are written against: the app with TypeBox as its type provider, and what all routes share. */
import type { Static, TSchema } from '@sinclair/typebox';
import type {
  FastifyBaseLogger,
  FastifyInstance,
  FastifyTypeProvider,
  RawReplyDefaultExpression,
  RawRequestDefaultExpression,
  RawServerDefault,
} from 'fastify';
import type { Digest } from '#base';
import type { NodeFolders } from '../mount/node-folders.ts';
import type { BlobStore } from '../store/blob-store.ts';
import type { AllowedPaths } from './allowed-paths.ts';
import type { JobQueue } from './jobs/job-queue.ts';
import type { Metrics } from './metrics.ts';
import type { OpenTrees } from './open-trees.ts';
import type { Caller, Role } from './tokens.ts';

interface TypeBoxProvider extends FastifyTypeProvider {
  readonly validator: this['schema'] extends TSchema ? Static<this['schema']> : unknown;
  readonly serializer: this['schema'] extends TSchema ? Static<this['schema']> : unknown;
}

export type App = FastifyInstance<
  RawServerDefault,
  RawRequestDefaultExpression<RawServerDefault>,
  RawReplyDefaultExpression<RawServerDefault>,
  FastifyBaseLogger,
  TypeBoxProvider
>;

declare module 'fastify' {
  interface FastifyContextConfig {
    /** What a caller must be; `open`: no token is asked for. */
    role?: Role | 'open';
    /** Not logged: asked for so often that logging would cost more than the answer. */
    hot?: boolean;
  }
  interface FastifyRequest {
    caller: Caller;
  }
}

export interface Shared {
  readonly store: BlobStore;
  readonly queue: JobQueue;
  readonly trees: OpenTrees;
  readonly paths: AllowedPaths;
  readonly folders: Partial<NodeFolders>;
  readonly metrics: Metrics;
  /** What garbage collection must leave, whatever names say. */
  readonly inUse: () => Promise<ReadonlySet<Digest>>;
  readonly isDraining: () => boolean;
  /** Streams that are open until somebody ends them. */
  readonly streams: Set<{ end(): void }>;
}
