/**
 * The resolver of one node, for all its sandboxes that have a policy. It holds no state that matters: when it dies nothing more is opened, and
 * what was opened closes when its time is over.
 */
import type { OpenedAddresses, SandboxNames } from '../opened-addresses.ts';
import type { AskLimits } from './ask-upstream.ts';
import type { Query } from './dns-message.ts';
import { NameLookup } from './name-lookup.ts';
import { type DoorAddress, ResolverDoor } from './resolver-door.ts';
import {
  ANSWER_LIMITS,
  type AnswerLimits,
  type AnswerParts,
  type DeniedName,
  SandboxAnswers,
} from './sandbox-answers.ts';
import { configuredServers, type UpstreamServer, UpstreamServers } from './upstream-servers.ts';

export interface ResolverOptions {
  readonly opened: OpenedAddresses;
  /** Told of what was not answered. Must not throw. */
  readonly denied: (denied: DeniedName) => void;
  readonly addresses: readonly DoorAddress[];
  /** By default those of $DSEC_DNS_SERVERS, else those of /etc/resolv.conf. */
  readonly upstreams?: readonly UpstreamServer[];
  readonly limits?: AnswerLimits;
  readonly askLimits?: AskLimits;
}

export class Resolver {
  private readonly parts: AnswerParts;
  /** Kept as long as a policy is; several sandboxes may share one. */
  private readonly answers = new WeakMap<SandboxNames, Map<string, SandboxAnswers>>();
  private doors: ResolverDoor[] = [];

  private constructor({ opened, denied, upstreams, limits = ANSWER_LIMITS, askLimits }: ResolverOptions) {
    const lookup = new NameLookup({
      servers: new UpstreamServers(upstreams ?? configuredServers()),
      limits: askLimits,
    });
    this.parts = { lookup, opened, denied, limits };
  }

  /** Resolves when it answers at all its addresses. */
  static async open(options: ResolverOptions): Promise<Resolver> {
    const resolver = new Resolver(options);
    try {
      for (const address of options.addresses) {
        const door = await ResolverDoor.open((...question) => resolver.answer(...question), address);
        resolver.doors.push(door);
      }
    } catch (error) {
      resolver.close();
      throw error;
    }
    return resolver;
  }

  /** Where it is asked: ports that were left open are chosen. */
  get addresses(): { readonly address: string; readonly port: number }[] {
    return this.doors.map(({ address, port }) => ({ address, port }));
  }

  close(): void {
    for (const door of this.doors) door.close();
    this.doors = [];
  }

  private async answer(
    message: Buffer,
    from: DeniedName['from'],
    limitBytes: (query: Query) => number,
  ): Promise<Buffer | undefined> {
    const { opened } = this.parts;
    try {
      const sandbox = opened.sandboxAt(from.address);
      const names = sandbox === undefined ? undefined : opened.namesOf(sandbox);
      if (sandbox === undefined || names === undefined) return undefined;
      const holds = () => opened.namesOf(sandbox) === names;
      return await this.answersOf(sandbox, names).answer(message, from, limitBytes, holds);
    } catch {
      // Of the policy's side: without it nothing is answered.
      return undefined;
    }
  }

  private answersOf(sandbox: string, names: SandboxNames): SandboxAnswers {
    const all = this.answers.get(names) ?? new Map<string, SandboxAnswers>();
    this.answers.set(names, all);
    const answers = all.get(sandbox) ?? new SandboxAnswers(sandbox, names, this.parts);
    all.set(sandbox, answers);
    return answers;
  }
}
