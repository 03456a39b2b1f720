/**
 * A sandbox that stands still: paused, or for the moment in which its changes are read. The record says what is meant (`pausedAt`) before
 * anything is done about it; a process that comes after a killed one makes it so.
 *
 * One after the other: pausing, resuming, reading. Giving memory back comes after a pause and holds nobody up: who resumes ends it.
 */
import { failPoint } from '#base';
import type { AgentLink } from '../aether/agent-link.ts';
import type { CommandGroups } from '../aether/command-group.ts';
import { freezeCommands } from '../aether/freeze.ts';
import { prefetchMemory, reclaimMemory } from '../aether/reclaim-memory.ts';
import { thawCommands } from '../backend/cgroup-cleanup.ts';
import { fail } from '../errors.ts';
import type { ResidentFacts } from '../sandbox/sandbox-record.ts';
import type { PauseReport } from '../sandbox-api/sandbox.ts';

export interface PausingHost {
  readonly name: string;
  readonly link: AgentLink;
  readonly groups: CommandGroups | undefined;
  readonly cgroups: readonly string[];
  /** @throws what a request gets when the sandbox has ended */
  refuseEnded(): void;
  /** On record. @throws RUNTIME_RECORD_WRITE */
  note(change: Partial<ResidentFacts>): void;
}

export class Pausing {
  private readonly host: PausingHost;
  private turn: Promise<unknown> = Promise.resolve();
  private pausedAt: string | undefined;
  private report: Promise<PauseReport> | undefined;
  private waking: Promise<void> | undefined;
  /** What goes on beside: giving memory back, or reading it. Another one at each change. */
  private beside = new AbortController();
  private readonly over = new AbortController();

  /** `pausedAt`: of one that was paused before this process came. */
  constructor(host: PausingHost, pausedAt: string | undefined) {
    this.host = host;
    this.pausedAt = pausedAt;
  }

  get isPaused(): boolean {
    return this.pausedAt !== undefined;
  }

  /** Resolves when its memory was given back. Of a paused one: when that was. @throws RUNTIME_PAUSE_STUCK, RUNTIME_UNSUPPORTED, RUNTIME_SANDBOX_GONE */
  async pause(): Promise<PauseReport> {
    await this.inTurn(async () => {
      this.host.refuseEnded();
      if (this.isPaused) return;
      const pausedAt = new Date().toISOString();
      this.host.note({ pausedAt });
      failPoint('pause-recorded');
      try {
        await this.standStill();
      } catch (error) {
        this.host.note({ pausedAt: undefined });
        throw error;
      }
      failPoint('pause-frozen');
      this.pausedAt = pausedAt;
      this.report = this.giveBack(pausedAt);
    });
    return this.report ?? { pausedAt: this.pausedAt ?? '', beforeBytes: 0, afterBytes: 0 };
  }

  /** Of one that is not paused: nothing. @throws RUNTIME_SANDBOX_GONE */
  resume(): Promise<void> {
    return this.inTurn(async () => {
      this.host.refuseEnded();
      if (this.isPaused) this.goOn();
    });
  }

  /** Somebody wants something of it. */
  wake(): void {
    this.waking ??= this.resume()
      .catch(() => {})
      .finally(() => {
        this.waking = undefined;
      });
  }

  /**
   * `work` while nothing in it moves; `done` ends that early. Requests wait meanwhile. A paused one stays so. `signal`: it ends.
   * @throws RUNTIME_PAUSE_STUCK, RUNTIME_UNSUPPORTED, RUNTIME_SANDBOX_GONE
   */
  async whileStill<T>(work: (done: () => void, signal: AbortSignal) => Promise<T>): Promise<T> {
    let done!: () => void;
    const read = new Promise<void>((resolve) => {
      done = resolve;
    });
    let ready!: { resolve(): void; reject(error: unknown): void };
    const stands = new Promise<void>((resolve, reject) => {
      ready = { resolve, reject };
    });
    const turn = this.inTurn(async () => {
      try {
        this.host.refuseEnded();
        if (!this.isPaused) await this.standStill();
      } catch (error) {
        ready.reject(error);
        return;
      }
      failPoint('pack-frozen');
      ready.resolve();
      await read;
      if (!this.isPaused) this.thaw();
    });
    await stands;
    try {
      return await work(done, this.over.signal);
    } finally {
      done();
      await turn;
    }
  }

  /** After a restart: what the record says is made so. */
  async takeUp(): Promise<void> {
    const { pausedAt } = this;
    if (pausedAt === undefined) return;
    await this.inTurn(async () => {
      try {
        await this.standStill();
        this.report = this.giveBack(pausedAt);
        this.report.catch(() => {});
      } catch {
        // It runs, then, and says so.
        this.goOn();
      }
    });
  }

  /** What reads its changes is to end. */
  interrupt(): void {
    this.over.abort(fail('RUNTIME_SANDBOX_GONE', { name: this.host.name, reason: 'it was ended meanwhile' }));
  }

  /** It is being ended, which takes no effect on what stands still (cgroup v1). */
  end(): void {
    this.interrupt();
    this.beside.abort();
    if (this.host.groups !== undefined) thawCommands(this.host.groups.parent);
  }

  private async standStill(): Promise<void> {
    const { name, link, groups } = this.host;
    if (groups === undefined) throw fail('RUNTIME_UNSUPPORTED', { backend: 'dsec', capability: 'pause' });
    await link.stand();
    try {
      await freezeCommands(name, groups);
      this.over.signal.throwIfAborted();
    } catch (error) {
      this.thaw();
      throw error;
    }
  }

  private goOn(): void {
    this.report = undefined;
    try {
      this.host.note({ pausedAt: undefined, stoodMs: Math.round(this.host.link.stoodMs()) });
    } catch {
      // On a full disk it goes on all the same; the next process would find it paused, and a request resumes it again.
    }
    failPoint('resume-recorded');
    this.pausedAt = undefined;
    this.beside.abort();
    this.beside = new AbortController();
    prefetchMemory(this.host.groups!, this.beside.signal).catch(() => {});
    this.thaw();
    failPoint('resume-thawed');
  }

  private thaw(): void {
    if (this.host.groups !== undefined) thawCommands(this.host.groups.parent);
    this.host.link.go();
  }

  private async giveBack(pausedAt: string): Promise<PauseReport> {
    this.beside.abort();
    this.beside = new AbortController();
    const { cgroups, groups } = this.host;
    const reclaimed = await reclaimMemory(cgroups, groups!, this.beside.signal);
    failPoint('pause-reclaimed');
    return { pausedAt, ...reclaimed };
  }

  private inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.turn.then(work);
    this.turn = done.catch(() => {});
    return done;
  }
}
