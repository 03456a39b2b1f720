/**
 * How a sandbox that stays comes to its agent: by our own launcher, which is the keeper, or by an OCI runtime that the keeper starts. What follows, and what
 * the agent can do, is the same: its channel is held by the keeper from the first moment.
 */
import { isDsecError } from '#base';
import type { KeeperChannel } from '../aether/keeper-channel.ts';
import { PayloadWriter } from '../backend/agent-wire.ts';
import type { LaunchSpec, PreparationSpec } from '../backend/backend.ts';
import { idExtents } from '../backend/id-ranges.ts';
import { launchOrder, preparation } from '../backend/launch-order.ts';
import { findOciRuntime, type OciBackend, openOciBackend } from '../backend/oci-runtime.ts';
import { OWN_BACKEND } from '../backend/own-backend.ts';
import type { SandboxCgroup } from '../backend/sandbox-cgroups.ts';
import { openUserNamespace, userNamespaceOf } from '../backend/user-namespace.ts';
import { fail } from '../errors.ts';

export interface ResidentLaunch {
  /** What can be done before the root is there. */
  begin(): void;
  /** Descriptor of a user namespace with the ids of `idBase`. After `begin`. */
  userNamespace(idBase: number): Promise<number>;
  /** `spec.process` is the agent's: only where it starts counts. */
  launch(spec: LaunchSpec, lifetimeMs: number): void;
}

/** Why it never had an agent; `folder`: its bundle, where a runtime leaves what it said. */
export function startFailure(error: Error, backend: string, folder: string, runDir: string): Error {
  if (isDsecError(error)) return error;
  const said = backend === OWN_BACKEND ? undefined : openOciBackend(runDir, findOciRuntime(backend)).problemIn(folder);
  return fail('RUNTIME_START_FAILED', { runtime: backend, reason: said ?? error.message }, error);
}

export interface LaunchParts {
  readonly backend: string;
  readonly keeper: KeeperChannel;
  readonly keptId: number;
  readonly spec: Pick<PreparationSpec, 'id' | 'network' | 'idBase'>;
  readonly groups: readonly SandboxCgroup[];
  readonly runDir: string;
  /** Path of dsec-agent, for those that show it inside. */
  readonly agent: string;
}

/** @throws RUNTIME_NO_OCI_RUNTIME */
export function residentLaunch(parts: LaunchParts): ResidentLaunch {
  return parts.backend === OWN_BACKEND ? ownLaunch(parts) : ociLaunch(parts);
}

function ownLaunch({ keeper, keptId, spec, groups }: LaunchParts): ResidentLaunch {
  const prepared = () => preparation(spec, 'own', groups);
  let began: Promise<number> | undefined;
  return {
    begin() {
      if (spec.idBase === undefined) keeper.prepare(keptId, prepared());
      else began = keeper.prepareMapped(keptId, prepared());
    },
    async userNamespace() {
      try {
        return userNamespaceOf((await began)!);
      } catch (error) {
        // It has ended already.
        throw startFailure(error as Error, OWN_BACKEND, '', '');
      }
    },
    launch(launchSpec, lifetimeMs) {
      keeper.launch(keptId, launchOrder(launchSpec, undefined, { lifetimeMs }));
    },
  };
}

function ociLaunch({ backend, keeper, keptId, spec, groups, runDir, agent }: LaunchParts): ResidentLaunch {
  const runtime: OciBackend = openOciBackend(runDir, findOciRuntime(backend));
  return {
    begin() {},
    userNamespace: (idBase) => openUserNamespace(idExtents(idBase)),
    launch(launchSpec, lifetimeMs) {
      const leaf = groups.find((group) => group.leaf !== undefined)?.leaf;
      const { args, pidFile } = runtime.residentCommand(launchSpec, { agent, lifetimeMs, leaf });
      const out = new PayloadWriter().bytes(preparation({ ...spec, idBase: undefined }, 'own', groups));
      out.list(args, (arg) => out.bytes(arg)).bytes(pidFile);
      keeper.startByRuntime(keptId, out.done());
    },
  };
}
