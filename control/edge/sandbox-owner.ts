/** Whose a sandbox is and what was promised to it: comes with its creation, and stays in its record, so that an edge that starts anew has it all. */
import { type Static, Type } from '@sinclair/typebox';
import { Value } from '@sinclair/typebox/value';
import { MACHINE_SIZES, SANDBOX_BACKENDS, type SandboxBackend, type SandboxRecord, type SandboxTag } from '#runtime';
import { fail } from '../errors.ts';
import type { Amounts } from '../placement/amounts.ts';
import type { BackendName } from '../placement/node-report.ts';
import { backendOf } from '../runtime-service/backend-view.ts';
import { GPU_KIND } from './gpu-cards.ts';

const Text = Type.String({ minLength: 1, maxLength: 512 });
const Count = Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER });

export const OwnerBody = Type.Object(
  {
    project: Text,
    user: Text,
    job: Type.Optional(Text),
    /** Of quota: who asked for the sandbox knows it by this. */
    reservation: Type.Optional(Text),
  },
  { additionalProperties: false },
);
export type SandboxOwner = Static<typeof OwnerBody>;

export const AmountsBody = Type.Object(
  { cpuMilli: Count, memoryBytes: Count, diskBytes: Count, gpus: Type.Integer({ minimum: 0, maximum: 1024 }) },
  { additionalProperties: false },
);

/** What a creation says beside what the runtime takes. */
export const ownerFields = {
  owner: Type.Optional(OwnerBody),
  amounts: Type.Optional(AmountsBody),
  backend: Type.Optional(Type.Union(SANDBOX_BACKENDS.map((name) => Type.Literal(name)))),
  alone: Type.Optional(Type.Boolean()),
  /** Of the graphics processors among its amounts; any by default. */
  gpuKind: Type.Optional(Type.String({ pattern: GPU_KIND })),
};

export interface Promised {
  readonly owner: SandboxOwner;
  readonly amounts: Amounts;
  readonly backend: BackendName;
  /** No other user's sandboxes beside it. */
  readonly alone: boolean;
  readonly gpuKind?: string;
}

/** Of sandboxes that were made on the machine itself. */
export const LOCAL_OWNER: SandboxOwner = { project: 'local', user: 'local' };

const GIB = 2 ** 30;
const UNSAID: Amounts = { cpuMilli: 500, memoryBytes: GIB / 2, diskBytes: 2 * GIB, gpus: 0 };

interface Limits {
  readonly cpus?: number | null;
  readonly memoryBytes?: number | null;
  readonly diskBytes?: number | null;
}

/** What its limits come to, and a small sandbox's share of what it has no limit of. */
export function amountsOf({ cpus, memoryBytes, diskBytes }: Limits, backend: SandboxBackend): Amounts {
  const unsaid = unsaidIn(backend, UNSAID);
  return {
    cpuMilli: cpus ? Math.ceil(cpus * 1000) : unsaid.cpuMilli,
    memoryBytes: memoryBytes || unsaid.memoryBytes,
    diskBytes: diskBytes || unsaid.diskBytes,
    gpus: 0,
  };
}

/** What counts where there is no limit: of a container `defaults`, of a machine what it has then. Its disk takes what was written. */
export function unsaidIn<A extends Omit<Amounts, 'gpus'>>(backend: SandboxBackend, defaults: A): A {
  if (backend === 'container') return defaults;
  const { cpus, memoryBytes } = MACHINE_SIZES[backend];
  return { ...defaults, cpuMilli: cpus * 1000, memoryBytes };
}

/** With the amounts of those limits alone that a change names: another change may have come between. */
export function amountsAfter(now: Amounts, changes: Limits, amounts: Amounts): Amounts {
  const { cpus, memoryBytes, diskBytes } = changes;
  return {
    ...now,
    ...(cpus === undefined ? {} : { cpuMilli: amounts.cpuMilli }),
    ...(memoryBytes === undefined ? {} : { memoryBytes: amounts.memoryBytes }),
    ...(diskBytes === undefined ? {} : { diskBytes: amounts.diskBytes }),
  };
}

/** Of a request for other limits, as JSON: what the sandbox counts as then, which whoever counts for quotas knows. */
export const AMOUNTS_HEADER = 'x-dsec-amounts';

/** @throws SERVICE_BAD_REQUEST */
export function amountsIn(header: string | string[] | undefined): Amounts | undefined {
  if (header === undefined) return undefined;
  try {
    const told = JSON.parse(String(header)) as unknown;
    if (Value.Check(AmountsBody, told)) return told;
  } catch {
    // As if it were another thing.
  }
  throw fail('SERVICE_BAD_REQUEST', { problem: `${AMOUNTS_HEADER}: these are no amounts` });
}

interface EdgeTag extends Promised {
  /** Tells what is being created from what was there before. */
  readonly admission: { readonly epoch: string; readonly number: number };
  /** In place of the owner's, for a fork (runtime-service/fork-sandbox.ts). */
  readonly reservation?: string;
  /** Ids of the graphics processors that are its own. */
  readonly cards?: readonly string[];
}

export function promisedTag(
  { owner, amounts, backend, alone, gpuKind }: Promised,
  admission: EdgeTag['admission'],
  cards: readonly string[] = [],
): SandboxTag {
  const gpus = cards.length === 0 ? {} : { cards, ...(gpuKind === undefined ? {} : { gpuKind }) };
  return { owner, amounts, backend, alone, admission, ...gpus } satisfies EdgeTag;
}

export function cardsIn(tag: SandboxTag | undefined): readonly string[] {
  return edgeTag(tag)?.cards ?? [];
}

/** Of a record, of whoever made it. */
export function promisedOf(
  record: Pick<SandboxRecord, 'resident' | 'limits'> & { readonly backend?: string },
): Promised {
  const { resident, limits } = record;
  const backend = backendOf(record);
  return (
    promisedIn(resident?.tag) ?? {
      owner: LOCAL_OWNER,
      amounts: amountsOf(limits ?? {}, backend),
      backend,
      alone: false,
    }
  );
}

export function promisedIn(tag: SandboxTag | undefined): Promised | undefined {
  const found = edgeTag(tag);
  if (found === undefined) return undefined;
  const { owner, amounts, backend, alone, gpuKind } = found;
  return { owner, amounts, backend, alone, ...(gpuKind === undefined ? {} : { gpuKind }) };
}

export function admissionIn(tag: SandboxTag | undefined): EdgeTag['admission'] | undefined {
  return edgeTag(tag)?.admission;
}

export function reservationIn(tag: SandboxTag | undefined): string | undefined {
  return edgeTag(tag)?.reservation;
}

/** Nobody but an edge writes it. */
function edgeTag(tag: SandboxTag | undefined): EdgeTag | undefined {
  return tag?.owner === undefined ? undefined : (tag as unknown as EdgeTag);
}
