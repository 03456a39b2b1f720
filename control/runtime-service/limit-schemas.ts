/** Limits as clients of the runtime service send them: at the creation, and as changes, in which null takes one away. Their ranges are the runtime's to check. */
import { Type } from '@sinclair/typebox';

const Amount = Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER });
const Processors = Type.Number({ minimum: 0, maximum: 4096 });

export const limitFields = {
  cpus: Type.Optional(Processors),
  memoryBytes: Type.Optional(Amount),
  memorySwapBytes: Type.Optional(Amount),
  pids: Type.Optional(Amount),
  ioReadBps: Type.Optional(Amount),
  ioWriteBps: Type.Optional(Amount),
  ioReadIops: Type.Optional(Amount),
  ioWriteIops: Type.Optional(Amount),
  diskBytes: Type.Optional(Amount),
  inodes: Type.Optional(Amount),
};

/** As a union of types it would be coerced: null to 0, or 0 to null. */
const orNone = (schema: typeof Amount | typeof Processors) =>
  Type.Optional(Type.Unsafe<number | null>({ ...schema, nullable: true }));

export const LimitsBody = Type.Object(
  {
    cpus: orNone(Processors),
    memoryBytes: orNone(Amount),
    memorySwapBytes: orNone(Amount),
    pids: orNone(Amount),
    ioReadBps: orNone(Amount),
    ioWriteBps: orNone(Amount),
    ioReadIops: orNone(Amount),
    ioWriteIops: orNone(Amount),
    diskBytes: orNone(Amount),
    inodes: orNone(Amount),
  },
  { additionalProperties: false, minProperties: 1 },
);

/** `disk`: what an unlimited one has changed is counted too, file by file. */
export const UsageQuery = Type.Object({ disk: Type.Optional(Type.Boolean()) });
