/**
 * Who may do what, and how much of it: the interface of IAM, a library inside each apiserver over one database. `openIam` (open-iam.ts)
 * opens it. All that is checked and changed together is one transaction of that database, so several apiservers on one PostgreSQL agree.
 *
 * Promises: a change has happened, durably, when its promise resolves. What was revoked or disabled here is refused here at once, and
 * by every other process on the same database at most CACHE_MS later. No token is ever kept, logged or told twice: its sha256 is.
 */
import type { Action } from './actions.ts';
import type { Administration } from './administration.ts';

/** For how long a process may go on believing what it read about a token, a principal or a policy. */
export const CACHE_MS = 1000;

/** For so long a request id is answered with what became of its sandbox, after that has ended. */
export const RELEASED_KEPT_MS = 3_600_000;

export const KINDS = ['user', 'service', 'agent'] as const;
export type PrincipalKind = (typeof KINDS)[number];

/** Who calls: a valid token. It may do what is in `actions`, in `project` and below, as far as its principal's policies allow it. */
export interface Identity {
  readonly principal: string;
  readonly kind: PrincipalKind;
  /** Of the token; what the token makes belongs here when nothing else is said. */
  readonly project: string;
  readonly tokenId: string;
  /** Of the token. `authorize` says whether the principal has them too. */
  readonly actions: ReadonlySet<Action>;
  readonly expiresAtMs?: number;
}

export const RESOURCES = ['sandboxes', 'cpuMilli', 'memoryBytes', 'diskBytes'] as const;
export type Resource = (typeof RESOURCES)[number];
/** Whole numbers, 0 to 2^53 - 1. */
export type ResourceAmounts = Readonly<Record<Resource, number>>;

export interface ReserveRequest {
  readonly project: string;
  readonly user: string;
  /** The same project and requestId are given the same reservation; after it was released, one that has ended, for RELEASED_KEPT_MS. */
  readonly requestId?: string;
  readonly amounts: ResourceAmounts;
  /** The edge that is asked next: as `asking`, in the same transaction. */
  readonly edge?: string;
}

export interface Reservation {
  readonly id: string;
  readonly project: string;
  /**
   * `pending` until `placed` is called, also while an edge is asked. `ended`: it was placed, and released within the last RELEASED_KEPT_MS: there is
   * nothing of it but this answer.
   */
  readonly state: 'pending' | 'placed' | 'ended';
  /** The edge that it is on, or that was asked last. */
  readonly edge?: string;
  /** Its name on the edge, once it is placed. */
  readonly sandbox?: string;
  /** It was there before this call. */
  readonly existing: boolean;
}

export interface Roster {
  readonly epoch: string | number;
  /** By the edge's clock. */
  readonly writtenAtMs: number;
  /** Reservations of the sandboxes that live there. */
  readonly reservations: readonly string[];
}

export interface AuditEntry {
  readonly principal: string;
  readonly tokenId?: string;
  /** An Action, or what was tried: 'token.create'. */
  readonly action: string;
  readonly project: string;
  /** What it was about: a sandbox, a token's id, a path. */
  readonly target?: string;
  readonly outcome: 'done' | 'denied' | 'failed';
  readonly requestId?: string;
  /** Anything else; what looks like a token is blacked out. */
  readonly detail?: Readonly<Record<string, string | number | boolean>>;
}

export interface Iam extends Administration {
  /** @throws IAM_TOKEN_INVALID 401: the same answer for malformed, unknown, expired, revoked, and of a disabled principal */
  authenticate(token: string): Promise<Identity>;

  /**
   * Whether the token and a policy of its principal both allow `action` on `project`, which need not exist.
   * @throws IAM_DENIED 403; IAM_TOKEN_INVALID when the token has ended meanwhile
   */
  authorize(identity: Identity, action: Action, project: string): Promise<void>;

  /** `authorize` for long lists: the answer holds for CACHE_MS. */
  scope(identity: Identity, action: Action): Promise<(project: string) => boolean>;

  /**
   * Counts `amounts` for the project and all above it, or nothing of it. Many calls at once become one transaction.
   * @throws IAM_QUOTA 429 naming the first project of the chain, from the top, that has no room, and the resource; IAM_NOT_FOUND 404
   */
  reserve(request: ReserveRequest): Promise<Reservation>;

  /**
   * Before an edge is asked: so that its roster can end the reservation when nobody lives to call `placed` or `release`.
   * @throws IAM_RESERVATION_GONE 409: it was released, the edge must not be asked
   */
  asking(reservationId: string, edge: string): Promise<void>;

  /**
   * `edge` is the one that `asking` named last. Idempotent.
   * @throws IAM_RESERVATION_GONE 409: it was released, or is placed as something else, so the sandbox counts for nobody: it has to be removed
   */
  placed(reservationId: string, edge: string, sandbox: string): Promise<void>;

  /** Idempotent; unknown ids are released already. */
  release(reservationId: string): Promise<void>;

  /**
   * Other amounts for one that is there; those that are not named stay. What it grows by is checked as `reserve` does, unless it is `inUse` already.
   * @throws IAM_QUOTA, IAM_RESERVATION_GONE
   */
  resize(reservationId: string, amounts: Partial<ResourceAmounts>, inUse?: boolean): Promise<void>;

  /**
   * Releases what is placed on `edge` and not in a roster of it that was written later (by more than `clockSkewMs`, since it is another
   * clock); and what the edge was being asked for (by `askingGraceMs`, since the request may still be on its way). An edge that is gone for ever
   * is one with an empty roster.
   * @returns the reservations that this call released
   */
  reconcile(edge: string, roster: Roster): Promise<string[]>;

  /** What each reservation on that edge counts as. */
  amountsOn(edge: string): Promise<ReadonlyMap<string, ResourceAmounts>>;

  /** Those of a roster that do not count for any project: `reservationIds` that are unknown, or placed on another edge. */
  uncounted(edge: string, reservationIds: readonly string[]): Promise<string[]>;

  /**
   * Releases those that no edge was asked for in this time: whoever reserved them has died. The apiserver calls it now and then.
   * @returns how many
   */
  sweep(olderThanMs?: number): Promise<number>;

  /** Appended with the next group of reservations; resolves when it is kept. */
  audit(entry: AuditEntry): Promise<void>;

  /** Waits for what is under way. */
  close(): Promise<void>;
}
