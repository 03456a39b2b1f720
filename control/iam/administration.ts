/**
 * What people and agents do with IAM: projects, principals, policies, tokens, quotas, the audit log. Each call takes who makes it, holds
 * his rights against it inside the transaction that makes the change, and writes the audit entry there too.
 *
 * The one rule above all: nobody gives what he does not have. The actions of a policy or token are some of those that its maker has
 * himself on that project, by his token and his policies both, and they end no later than those do.
 */
import type { Action } from './actions.ts';
import type { Identity, PrincipalKind, Resource, ResourceAmounts } from './iam.ts';

export interface Project {
  /** `root/team/run`. */
  readonly path: string;
  readonly createdAtMs: number;
  readonly createdBy: string;
}

export interface Principal {
  /** Unique in the whole database. */
  readonly name: string;
  readonly kind: PrincipalKind;
  /** Whoever has policy.admin there may disable it, and may give it policies as far as he has them. */
  readonly project: string;
  readonly disabled: boolean;
  readonly createdAtMs: number;
  readonly createdBy: string;
}

export interface Policy {
  readonly id: string;
  readonly principal: string;
  /** It holds there and below. */
  readonly project: string;
  /** As given: roles and actions. */
  readonly grants: readonly string[];
  readonly actions: readonly Action[];
  readonly expiresAtMs?: number;
  readonly createdAtMs: number;
  readonly grantedBy: string;
}

export interface Token {
  readonly id: string;
  readonly principal: string;
  readonly project: string;
  readonly grants: readonly string[];
  readonly actions: readonly Action[];
  /** What its maker says it is for. */
  readonly note?: string;
  readonly expiresAtMs?: number;
  readonly createdAtMs: number;
  readonly createdBy: string;
  readonly revokedAtMs?: number;
}

/** `secret` is told this once. */
export interface MadeToken extends Token {
  readonly secret: string;
}

/** A resource that is absent has no limit of its own. */
export type Limits = Readonly<Partial<Record<Resource, number>>>;

export interface Quota {
  readonly project: string;
  readonly limits: Limits;
  /** What the limits of projects below set aside, the nearest limit of each branch: never above the limit here. */
  readonly delegated: ResourceAmounts;
  /** By reservations of this project and those below. */
  readonly used: ResourceAmounts;
}

export interface AuditRecord {
  readonly id: number;
  readonly atMs: number;
  readonly principal: string;
  readonly tokenId?: string;
  readonly action: string;
  readonly project: string;
  readonly target?: string;
  readonly outcome: string;
  readonly requestId?: string;
  readonly detail?: Readonly<Record<string, unknown>>;
}

export interface AuditQuery {
  readonly project: string;
  readonly principal?: string;
  readonly action?: string;
  /** Only those older than this id: for the next page. */
  readonly before?: number;
  readonly limit?: number;
}

export interface Administration {
  /** Needs project.admin on the parent. @throws IAM_EXISTS, IAM_NOT_FOUND (the parent) */
  createProject(by: Identity, path: string): Promise<Project>;
  /** Those at and below `path` that the caller may read (project.read). */
  listProjects(by: Identity, path?: string): Promise<Project[]>;
  /** Needs project.admin on the parent. @throws IAM_NOT_EMPTY while it has projects, reservations or principals; its policies and tokens go with it */
  removeProject(by: Identity, path: string): Promise<void>;

  /** Needs policy.admin on `project`. @throws IAM_EXISTS */
  createPrincipal(by: Identity, asked: { name: string; kind: PrincipalKind; project: string }): Promise<Principal>;
  /** Himself, and those of projects that he may read. */
  listPrincipals(by: Identity, project?: string): Promise<Principal[]>;
  /**
   * At once: all its tokens are refused. Needs policy.admin on its project; to enable it again, also all that its policies give it.
   * @throws IAM_LAST_ADMIN, IAM_BEYOND
   */
  disablePrincipal(by: Identity, name: string, disabled: boolean): Promise<Principal>;

  /** Needs policy.admin on `project`, and what is granted. @throws IAM_BEYOND */
  createPolicy(
    by: Identity,
    asked: { principal: string; project: string; grants: readonly string[]; expiresAtMs?: number },
  ): Promise<Policy>;
  /** His own, and those of projects where he has policy.admin. */
  listPolicies(by: Identity, query?: { project?: string; principal?: string }): Promise<Policy[]>;
  /** Needs policy.admin on its project. @throws IAM_LAST_ADMIN */
  removePolicy(by: Identity, id: string): Promise<void>;

  /**
   * Needs token.admin on `project`, and what is granted; for another principal also token.admin on that one's project.
   * Without grants: all that the caller has there himself. @throws IAM_BEYOND
   */
  createToken(
    by: Identity,
    asked: { principal?: string; project?: string; grants?: readonly string[]; expiresAtMs?: number; note?: string },
  ): Promise<MadeToken>;
  /** His own, and those of projects where he has token.admin; with `ended` also those that are revoked or expired. */
  listTokens(by: Identity, query?: { project?: string; principal?: string; ended?: boolean }): Promise<Token[]>;
  /** Its own, or with token.admin on its project. Idempotent. */
  revokeToken(by: Identity, id: string): Promise<Token>;

  /**
   * Replaces the limits that are named; null takes one away. Needs quota.admin on the parent (on root, for root), so that nobody raises what he was given.
   * @throws IAM_QUOTA_PARENT, IAM_QUOTA_DELEGATED
   */
  setQuota(by: Identity, project: string, limits: Readonly<Partial<Record<Resource, number | null>>>): Promise<Quota>;
  /** Needs project.read there. */
  getQuota(by: Identity, project: string): Promise<Quota>;
  /** Of every project at and below it that the caller may read. */
  listQuotas(by: Identity, project?: string): Promise<Quota[]>;

  /** Newest first. Needs audit.read on `query.project`. */
  readAudit(by: Identity, query: AuditQuery): Promise<AuditRecord[]>;

  /** What the caller is and may do: his policies as far as his token lets them. */
  whoAmI(by: Identity): Promise<{ identity: Identity; policies: Policy[] }>;
}
