/** Who asks, and whether he may: every route but health, documents and the console goes through here. */
import type { IncomingMessage } from 'node:http';
import type { FastifyRequest } from 'fastify';
import { fail } from '../errors.ts';
import type { Action } from '../iam/actions.ts';
import type { AuditEntry, Iam, Identity } from '../iam/iam.ts';
import type { RateLimit } from './rate-limit.ts';

declare module 'fastify' {
  interface FastifyRequest {
    /** Set before any handler of a route that is not open. */
    identity: Identity;
  }
}

const BEARER = /^Bearer ([\x21-\x7e]{1,1024})$/i;

/** For programs that can be given a URL alone: `https://any:TOKEN@host`. */
function passwordOf(authorization: string): string | undefined {
  const encoded = /^Basic ([A-Za-z0-9+/=]{1,2048})$/i.exec(authorization)?.[1];
  const text = encoded === undefined ? '' : Buffer.from(encoded, 'base64').toString('latin1');
  const token = text.slice(text.indexOf(':') + 1);
  return text.includes(':') && /^[\x21-\x7e]{1,1024}$/.test(token) ? token : undefined;
}

export class Access {
  private readonly iam: Iam;
  private readonly rate: RateLimit;

  constructor(iam: Iam, rate: RateLimit) {
    this.iam = iam;
    this.rate = rate;
  }

  /** @throws IAM_TOKEN_INVALID, API_RATE */
  async authenticate(request: IncomingMessage): Promise<Identity> {
    const given = request.headers.authorization ?? '';
    const token = BEARER.exec(given)?.[1] ?? passwordOf(given);
    // IAM has one answer for all that is no token; it is not asked about nothing.
    const identity = await this.iam.authenticate(token ?? '');
    this.rate.take(identity.principal);
    return identity;
  }

  /** What is denied is in the audit log too. @throws IAM_DENIED */
  async allow({ identity, id }: FastifyRequest, action: Action, project: string, target?: string): Promise<void> {
    return this.allowed(identity, action, project, id, target);
  }

  async allowed(
    identity: Identity,
    action: Action,
    project: string,
    requestId: string,
    target?: string,
  ): Promise<void> {
    try {
      await this.iam.authorize(identity, action, project);
    } catch (error) {
      if ((error as { code?: unknown }).code === 'IAM_DENIED') {
        await this.audit({ ...whose(identity), action, project, target, outcome: 'denied', requestId });
      }
      throw error;
    }
  }

  audit(entry: AuditEntry): Promise<void> {
    return this.iam.audit(entry);
  }

  /** Whether he may read the sandboxes of a project. */
  readable(identity: Identity): Promise<(project: string) => boolean> {
    return this.iam.scope(identity, 'sandbox.read');
  }
}

export function whose({ principal, tokenId }: Identity): { readonly principal: string; readonly tokenId: string } {
  return { principal, tokenId };
}

/** A project as it may be named. @throws SERVICE_BAD_REQUEST */
export function checkedProject(project: string): string {
  if (/^[a-z0-9][a-z0-9._-]{0,62}(?:\/[a-z0-9][a-z0-9._-]{0,62}){0,31}$/.test(project)) return project;
  throw fail('SERVICE_BAD_REQUEST', { problem: `"${project.slice(0, 80)}" is no project, such as root/team` });
}
