/** What requests and answers of the block service look like: checked on the way in, and shown by the OpenAPI document. */
import { type Static, Type } from '@sinclair/typebox';
import { OPERATIONS, WAY_NAMES } from '#ublk-daemon';

function words<T extends string>(values: readonly T[], description?: string) {
  return Type.Unsafe<T>(Type.String({ enum: [...values], description }));
}

const exact = { additionalProperties: false } as const;
const PATH_PATTERN = '^/[^\\u0000]*$';
const DiskName = Type.String({ minLength: 1, maxLength: 64, description: 'Of `dsec disk create`' });
const FilePath = Type.String({ minLength: 1, maxLength: 4096, pattern: PATH_PATTERN, description: 'Absolute' });
const Bytes = Type.Integer({ minimum: 0 });

export const DiskParams = Type.Object({
  name: Type.String({
    minLength: 1,
    maxLength: 4096,
    description: 'The name of a disk, or the path of a raw file, with / written as %2F',
  }),
});

export const AttachBody = Type.Object(
  {
    disk: Type.Optional(DiskName),
    file: Type.Optional(FilePath),
    way: Type.Optional(words(['auto', ...WAY_NAMES] as const, 'auto: what --at says, else ublk, else NBD')),
    readOnly: Type.Optional(Type.Boolean()),
    address: Type.Optional(
      Type.String({
        minLength: 1,
        maxLength: 4096,
        pattern: '^(unix:/|tcp:|/)[^\\u0000]*$',
        description: 'NBD: unix:/PATH or tcp:127.0.0.1:PORT; ublk: /dev/ublkbN; file, loop: the path of a file',
      }),
    ),
  },
  exact,
);

export const DetachQuery = Type.Object(
  { force: Type.Optional(Type.Boolean({ description: 'Also while it is in use' })) },
  exact,
);
export const SnapshotBody = Type.Object({ snapshot: Type.String({ minLength: 1, maxLength: 256 }) }, exact);
export const PackBody = Type.Object(
  {
    output: FilePath,
    since: Type.Optional(Type.String({ minLength: 1, maxLength: 256, description: 'A snapshot' })),
    whole: Type.Optional(Type.Boolean({ description: 'The whole disk, without a parent' })),
    compress: Type.Optional(words(['lz4', 'zstd'] as const, 'In a ZFile')),
    blockSizeKiB: Type.Optional(Type.Unsafe<number>(Type.Integer({ enum: [4, 8, 16, 32, 64] }))),
    tar: Type.Optional(Type.Boolean({ description: 'In the tar that registries carry' })),
  },
  exact,
);
export const ResizeBody = Type.Object({ sizeBytes: Type.Integer({ minimum: 512 }) }, exact);
export const ExportBody = Type.Object({ format: words(['raw', 'qcow2'] as const), output: FilePath }, exact);

const DiskShape = {
  name: Type.String(),
  kind: words(['disk', 'file'] as const),
  state: words(['attached', 'failed', 'detaching'] as const),
  way: words(WAY_NAMES),
  at: Type.String({ description: 'A device, an NBD URI, a file' }),
  readOnly: Type.Boolean(),
  attachedAt: Type.String(),
  sizeBytes: Type.Optional(Bytes),
  problem: Type.Optional(Type.String({ description: 'Why it is not served' })),
  working: Type.Array(Type.String(), { description: 'What is being done with it' }),
};
export const DiskSchema = Type.Object(DiskShape);

const Count = Type.Object({ count: Bytes, bytes: Bytes, errors: Bytes, seconds: Type.Number() });
export const DiskDetails = Type.Object({
  ...DiskShape,
  usedBy: Type.Optional(Type.String({ description: 'Who uses it now, as far as can be told' })),
  layers: Type.Optional(Type.Integer()),
  /** Of the writable layer. */
  liveBytes: Type.Optional(Bytes),
  usedBytes: Type.Optional(Bytes),
  lastError: Type.Optional(Type.String()),
  operations: Type.Optional(Type.Object(Object.fromEntries(OPERATIONS.map((name) => [name, Count])))),
});

export const DiskList = Type.Object({
  disksFolder: Type.String({ description: 'Where the named disks are' }),
  disks: Type.Array(DiskSchema),
});
export const Detached = Type.Object({ name: Type.String(), state: words(['detached', 'detaching'] as const) });
export const SnapshotMade = Type.Object({
  disk: Type.String(),
  snapshot: Type.String(),
  uuid: Type.String(),
  layer: Type.String(),
});
export const CompactDone = Type.Object({
  disk: Type.String(),
  indexEntriesBefore: Bytes,
  indexEntriesAfter: Bytes,
  reclaimedBytes: Bytes,
});
export const PackDone = Type.Object({
  disk: Type.String(),
  uuid: Type.String(),
  path: Type.String(),
  sizeBytes: Bytes,
  segments: Bytes,
});
export const ResizeDone = Type.Object({
  disk: Type.String(),
  sizeBytes: Bytes,
  told: Type.Boolean({ description: 'Clients see it now; else those that connect or open it again' }),
});
export const ExportDone = Type.Object({
  disk: Type.String(),
  format: Type.String(),
  file: Type.String(),
  sizeBytes: Bytes,
});

export const ErrorSchema = Type.Object({
  error: Type.Object({
    code: Type.String({ description: 'Stays the same; docs/errors.md lists all' }),
    message: Type.String(),
    hint: Type.Optional(Type.String()),
    retryable: Type.Boolean(),
    requestId: Type.String(),
  }),
});

export type AttachRequest = Static<typeof AttachBody>;
export type DiskAnswer = Static<typeof DiskSchema>;
export type DiskListAnswer = Static<typeof DiskList>;
export type PackRequest = Static<typeof PackBody>;
