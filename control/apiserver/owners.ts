/**
 * Whose a sandbox is: what is asked of it is allowed by its project. Its edge knows; it is asked at most once in a few seconds for each sandbox that is in use.
 * `uid` goes along with what is passed on, so that a sandbox that took the name meanwhile is not taken for the one that was asked about.
 */
import { isDsecError } from '#base';
import type { Edges } from './edges.ts';
import { gone } from './edges.ts';
import { readRoster } from './roster.ts';
import { type SandboxAddress, sandboxId } from './sandbox-id.ts';
import { projectOf } from './sandbox-list.ts';
import type { EdgeSandbox, Owner } from './sandbox-view.ts';

export interface KnownOwner extends Owner {
  readonly uid: string | undefined;
}

const BELIEVED_MS = 10_000;
/** In each of two maps. */
const MOST = 25_000;
/** Of a sandbox that nobody owns: made by root on that machine. */
const NOBODY: Owner = { project: 'root', user: '' };

interface Believed {
  readonly owner: KnownOwner;
  readonly until: number;
}

export class Owners {
  /**
   * Of now, and of before. Both go as a whole: a map that loses its oldest entry with each new one is walked through, over all that were lost, for
   * each of them.
   */
  private known = new Map<string, Believed>();
  private before = new Map<string, Believed>();
  private begunAt = 0;
  private readonly asking = new Map<string, Promise<KnownOwner>>();
  private readonly edges: Edges;

  constructor(edges: Edges) {
    this.edges = edges;
  }

  /** @throws SANDBOX_GONE, EDGE_UNREACHABLE, EDGE_UNKNOWN */
  async of(address: SandboxAddress): Promise<KnownOwner> {
    const id = sandboxId(address);
    const known = this.known.get(id) ?? this.before.get(id);
    if (known !== undefined && known.until > Date.now()) return known.owner;
    const asking = this.asking.get(id) ?? this.ask(address, id).finally(() => this.asking.delete(id));
    this.asking.set(id, asking);
    return asking;
  }

  /**
   * Of one that has ended too, as long as its edge knows of it: to stop it once more, or to remove it.
   * @throws as `of`
   */
  async ofEnded(address: SandboxAddress): Promise<KnownOwner> {
    try {
      return await this.of(address);
    } catch (error) {
      if (!isDsecError(error, 'SANDBOX_GONE')) throw error;
      const { sandboxes } = await readRoster(this.edges, address.edge, { name: address.name });
      const row = sandboxes.find(({ name }) => name === address.name);
      if (row === undefined) throw error;
      return { ...(row.owner ?? NOBODY), project: projectOf(row), uid: undefined };
    }
  }

  learn(id: string, owner: KnownOwner): void {
    const now = Date.now();
    if (now - this.begunAt >= BELIEVED_MS || this.known.size >= MOST) {
      this.before = this.known;
      this.known = new Map();
      this.begunAt = now;
    }
    this.known.set(id, { owner, until: now + BELIEVED_MS });
  }

  forget(id: string): void {
    this.known.delete(id);
    this.before.delete(id);
  }

  private async ask({ name, edge }: SandboxAddress, id: string): Promise<KnownOwner> {
    try {
      const path = `/v1/sandboxes/${encodeURIComponent(name)}`;
      const told = await this.edges.ask<EdgeSandbox>(edge, { method: 'GET', path });
      const owner = { ...(told.owner ?? NOBODY), project: projectOf(told), uid: told.id };
      this.learn(id, owner);
      return owner;
    } catch (error) {
      throw gone(id, error);
    }
  }
}
