/** What clients may ask the apiserver for. Of a sandbox it is what the runtime service takes, but for the store, which the cluster has. */
import { type Static, Type } from '@sinclair/typebox';
import { BACKENDS } from '#runtime';
import { GPU_KIND } from '../edge/gpu-cards.ts';
import { createFields } from '../runtime-service/sandbox-routes.ts';

const { store: _store, ...ofRuntime } = createFields;
const Text = (maxLength: number) => Type.String({ minLength: 1, maxLength });

export const ProjectPath = Type.String({ minLength: 1, maxLength: 1000, description: 'root/team/run' });

export const CreateRequest = Type.Object(
  {
    ...ofRuntime,
    image: Text(1000),
    name: Type.Optional(Type.String({ pattern: '^[a-z0-9][a-z0-9_.-]{0,62}$' })),
    requestId: Type.Optional(Text(256)),
    /** `fncall` has no sandboxes, and is refused as such (RUNTIME_UNSUPPORTED). */
    backend: Type.Optional(Type.Union(BACKENDS.map((name) => Type.Literal(name)))),
    store: Type.Optional(Text(1000)),
    project: Type.Optional(ProjectPath),
    job: Type.Optional(Text(200)),
    labels: Type.Optional(Type.Array(Text(200), { maxItems: 32 })),
    alone: Type.Optional(Type.Boolean()),
    gpus: Type.Optional(Type.Integer({ minimum: 0, maximum: 64, description: 'graphics processors of its own' })),
    gpuKind: Type.Optional(Type.String({ pattern: GPU_KIND, description: 'h100-80gb-hbm3; any by default' })),
  },
  { additionalProperties: false },
);
export type CreateAsked = Static<typeof CreateRequest>;

export const MOST_IN_BATCH = 32_000;

/** One of the two forms. */
export const BatchRequest = Type.Object(
  {
    request: Type.Optional(CreateRequest),
    count: Type.Optional(Type.Integer({ minimum: 1, maximum: MOST_IN_BATCH })),
    requests: Type.Optional(Type.Array(CreateRequest, { minItems: 1, maxItems: MOST_IN_BATCH })),
  },
  { additionalProperties: false },
);

export const SandboxQuery = Type.Object(
  {
    name: Type.Optional(Type.String({ minLength: 1, maxLength: 200, description: 'without its edge' })),
    project: Type.Optional(ProjectPath),
    user: Type.Optional(Text(200)),
    job: Type.Optional(Text(200)),
    state: Type.Optional(Text(40)),
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: 10_000 })),
    continue: Type.Optional(Type.String({ minLength: 1, maxLength: 400, description: 'of the page before' })),
  },
  { additionalProperties: false },
);
export type SandboxFilter = Static<typeof SandboxQuery>;

export const DrainBody = Type.Object({ on: Type.Boolean() }, { additionalProperties: false });
