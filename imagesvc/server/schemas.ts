/** What requests and answers look like: checked on the way in, used to write answers, and shown by the OpenAPI document. */
import { type TSchema, Type } from '@sinclair/typebox';
import { CODEC_NAMES, MAX_INLINE_LIMIT_BYTES } from '#converter';
import { JOB_STATES, type JobView } from './jobs/job.ts';

function words<T extends string>(values: readonly T[], description?: string) {
  return Type.Unsafe<T>(Type.String({ enum: [...values], description }));
}

const exact = { additionalProperties: false } as const;

const Source = Type.String({
  minLength: 1,
  maxLength: 4096,
  pattern: '^[^\\u0000-\\u001f]+$',
  description:
    'As `dsec convert` takes it: docker://REFERENCE, oci:FOLDER[:TAG], oci-archive:, docker-archive:, tar:, dir:',
  examples: ['docker://docker.io/library/alpine:3.20'],
});
export const ImageName = Type.String({
  minLength: 1,
  maxLength: 512,
  description: 'repository:tag',
  examples: ['team/web:1'],
});
const AnyImage = Type.String({
  minLength: 1,
  maxLength: 512,
  description: 'Name, digest, or the first digits of a digest',
});
const LocalPath = Type.String({
  minLength: 1,
  maxLength: 4096,
  pattern: '^/[^\\u0000]*$',
  description: "An absolute path on the service's machine, below a folder that --allow-path names",
});
const Bytes = Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER });
const Compress = Type.Optional(words(CODEC_NAMES, 'Compress file data'));

export const ConvertBody = Type.Object(
  {
    source: Source,
    name: ImageName,
    kind: Type.Optional(words(['base', 'workspace', 'toolkit'] as const)),
    collapse: Type.Optional(words(['data', 'metadata'] as const)),
    collapseLimitBytes: Type.Optional(Bytes),
    inlineLimitBytes: Type.Optional(Type.Integer({ minimum: 0, maximum: MAX_INLINE_LIMIT_BYTES })),
    compress: Compress,
    platform: Type.Optional(
      Type.String({ maxLength: 64, pattern: '^[a-z0-9._-]+/[a-z0-9._-]+(/[a-z0-9._-]+)?$', examples: ['linux/amd64'] }),
    ),
    prefix: Type.Optional(
      Type.String({
        maxLength: 1024,
        pattern: '^/[^\\u0000]*$',
        description: 'Of tar: and dir:, the folder of the image that the tree is placed at',
        examples: ['/workspace'],
      }),
    ),
    insecure: Type.Optional(Type.Boolean({ description: 'Plain HTTP, or TLS without checking certificates' })),
    credentials: Type.Optional(
      Type.String({ maxLength: 16_384, description: 'user:password for the registry; forgotten when the job ends' }),
    ),
  },
  exact,
);

export const PackDiffBody = Type.Object(
  {
    upper: LocalPath,
    image: AnyImage,
    name: ImageName,
    kind: Type.Optional(words(['snapshot', 'workspace', 'toolkit'] as const)),
    exclude: Type.Optional(Type.Array(Type.String({ minLength: 1, maxLength: 1024 }), { maxItems: 256 })),
    policy: Type.Optional(Type.Boolean({ description: 'Leave build residue out: true by default' })),
    compress: Compress,
  },
  exact,
);

const JobShape = Type.Object({
  id: Type.String(),
  kind: words(['convert', 'pack-diff'] as const),
  state: words(JOB_STATES),
  caller: Type.String({ description: 'Who asked for it first' }),
  attempt: Type.Integer(),
  createdAt: Type.String(),
  startedAt: Type.Optional(Type.String()),
  endedAt: Type.Optional(Type.String()),
  cancelling: Type.Optional(Type.Boolean()),
  request: Type.Record(Type.String(), Type.Unknown()),
  result: Type.Optional(
    Type.Object({
      name: Type.String(),
      digest: Type.String(),
      kind: Type.String(),
      layers: Type.Integer(),
      metaBytes: Type.Number(),
      dataBytes: Type.Number(),
      sizeBytes: Type.Number(),
      reused: Type.Boolean({ description: 'The result was in the store already' }),
      stats: Type.Optional(Type.Record(Type.String(), Type.Number())),
      notes: Type.Array(Type.String()),
    }),
  ),
  error: Type.Optional(
    Type.Object({
      code: Type.String(),
      message: Type.String(),
      hint: Type.Optional(Type.String()),
      exit: Type.Integer(),
      retryable: Type.Boolean(),
    }),
  ),
});

export const JobSchema = Type.Unsafe<JobView>(JobShape);

export const JobParams = Type.Object({ id: Type.String({ minLength: 1, maxLength: 64 }) });

export const JobsQuery = Type.Object(
  {
    state: Type.Optional(words(JOB_STATES)),
    caller: Type.Optional(Type.String({ maxLength: 64 })),
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: 1000, default: 100 })),
  },
  exact,
);

export const ErrorSchema = Type.Object({
  error: Type.Object({
    code: Type.String({ description: 'Stays the same; docs/errors.md lists all' }),
    message: Type.String(),
    hint: Type.Optional(Type.String()),
    retryable: Type.Boolean(),
    requestId: Type.String(),
  }),
});

export const ImageParams = Type.Object({
  image: Type.String({ minLength: 1, maxLength: 512, description: 'Name or digest, with / written as %2F' }),
});

export const TraceParams = Type.Object({
  image: Type.String({ minLength: 1, maxLength: 512, description: 'Name or digest, with / written as %2F' }),
  trace: Type.String({ minLength: 1, maxLength: 64, description: 'Name of the trace' }),
});

/** The whole of it is checked by what reads traces. */
export const TraceBody = Type.Object({
  format: Type.String(),
  version: Type.Integer(),
  image: Type.String({ description: "Digest of the image's manifest" }),
  command: Type.Array(Type.String()),
  truncated: Type.Optional(Type.Boolean()),
  blobs: Type.Array(Type.Unknown(), { description: 'digest, sizeBytes' }),
  chunks: Type.Array(Type.Unknown(), { description: '[blob, chunk, ms], in the order of the first touch' }),
  files: Type.Array(Type.Unknown(), { description: 'path, sizeBytes, ms, ranges' }),
});

const TreePath = {
  path: Type.Optional(Type.String({ maxLength: 16_384, description: 'In the image; / by default' })),
  pathBase64: Type.Optional(
    Type.String({
      maxLength: 16_384,
      pattern: '^[A-Za-z0-9+/]*={0,2}$',
      description: 'In place of path, for names that are no UTF-8',
    }),
  ),
};
export const ListQuery = Type.Object({ ...TreePath, recursive: Type.Optional(Type.Boolean()) }, exact);
export const StatQuery = Type.Object(
  { ...TreePath, follow: Type.Optional(Type.Boolean({ description: 'Follow a link at the end of the path' })) },
  exact,
);
export const CatQuery = Type.Object(TreePath, exact);
export const DiffQuery = Type.Object({ with: AnyImage, ignoreMtime: Type.Optional(Type.Boolean()) }, exact);
export const RemoveQuery = Type.Object({ dryRun: Type.Optional(Type.Boolean()) }, exact);

export const MountBody = Type.Object(
  {
    image: AnyImage,
    target: LocalPath,
    upper: Type.Optional(LocalPath),
    lazy: Type.Optional(
      Type.Boolean({ description: 'Fetch data when it is read; always so where the store is no folder' }),
    ),
    prefetch: Type.Optional(
      Type.Boolean({ description: 'Of a lazy mount: fetch ahead what traces say a start reads; true by default' }),
    ),
  },
  exact,
);
export const MountParams = Type.Object({ id: Type.String({ pattern: '^[0-9a-f]{12}$' }) });
export const UnmountQuery = Type.Object({ lazy: Type.Optional(Type.Boolean()) }, exact);

export const GcBody = Type.Object(
  {
    dryRun: Type.Optional(Type.Boolean({ description: 'Only say what would be deleted' })),
    graceMs: Type.Optional(
      Type.Integer({ minimum: 0, maximum: 1e12, description: 'Younger blobs are left alone; an hour by default' }),
    ),
  },
  exact,
);

export const GcResult = Type.Object({
  deleted: Type.Array(Type.String()),
  freedBytes: Type.Number(),
  kept: Type.Integer({ description: 'Without a name, but young, mounted, or needed by who is at work' }),
  traces: Type.Integer({ description: 'Traces that went with their images' }),
  caches: Type.Object({
    proofs: Type.Integer(),
    metaCopies: Type.Integer(),
    chunkBlobs: Type.Integer(),
    freedBytes: Type.Number(),
    busy: Type.Boolean({ description: 'The chunk cache was left alone: its owner did not answer' }),
  }),
});

/** An answer of some other type than JSON. */
export function body(description: string, contentType: string, schema: TSchema = Type.String()) {
  return { description, content: { [contentType]: { schema } } };
}

export function described<T extends TSchema>(schema: T, description: string): T {
  return { ...schema, description };
}
