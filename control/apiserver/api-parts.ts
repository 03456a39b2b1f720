/** What the routes of the apiserver are made of, put together once in apiserver.ts. */
import type { Duplex } from 'node:stream';
import type { BlobStore } from '#imagesvc';
import type { Iam } from '../iam/iam.ts';
import type { Access } from './access.ts';
import type { CreateDefaults, SandboxMaker } from './create-sandbox.ts';
import type { EdgeConnections } from './edge-connection.ts';
import type { Edges } from './edges.ts';
import type { Events } from './events.ts';
import type { OverflowNodes } from './overflow.ts';
import type { Owners } from './owners.ts';
import type { Reconciler } from './reconcile.ts';
import type { WorkInHand } from './work-in-hand.ts';

export interface ApiParts {
  readonly iam: Iam;
  readonly access: Access;
  readonly edges: Edges;
  readonly connections: EdgeConnections;
  readonly owners: Owners;
  readonly maker: SandboxMaker;
  readonly work: WorkInHand;
  readonly events: Events;
  readonly reconciler: Reconciler;
  readonly store: BlobStore;
  readonly overflow: OverflowNodes | undefined;
  readonly defaults: CreateDefaults;
  /** Connections that are no requests of the app any more. */
  readonly upgraded: Set<Duplex>;
  readonly note: (problem: string) => void;
}
