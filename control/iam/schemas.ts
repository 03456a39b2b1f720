/** What IAM's routes take and give, for checking and for the OpenAPI description. */
import { type TSchema, Type } from '@sinclair/typebox';
import { ACTIONS, ROLES } from './actions.ts';
import { KINDS, RESOURCES } from './iam.ts';

const MAX = Number.MAX_SAFE_INTEGER;
const strict = { additionalProperties: false };
const oneOf = (values: readonly string[], description: string) => Type.String({ enum: [...values], description });
const optional = <T extends TSchema>(schema: T) => Type.Optional(schema);

export const Path = Type.String({ minLength: 1, maxLength: 1024, description: 'path of a project: root/team/run' });
export const Name = Type.String({ minLength: 1, maxLength: 100 });
const Kind = oneOf(KINDS, 'what kind of principal');
const Time = Type.Integer({ minimum: 0, maximum: 8.64e15, description: 'milliseconds since 1970' });
const Grants = Type.Array(Type.String({ maxLength: 64 }), {
  minItems: 1,
  maxItems: 64,
  description: `roles (${Object.keys(ROLES).join(', ')}) and actions (${ACTIONS.join(', ')})`,
});
const amounts = (description: string, schema: TSchema) =>
  Type.Object(Object.fromEntries(RESOURCES.map((resource) => [resource, schema])), { ...strict, description });
const Amount = Type.Integer({ minimum: 0, maximum: MAX });
/** Not a union: validation coerces values to the first of a union that it can, and would take null for 0. */
const AmountOrNull = Type.Unsafe<number | null>({ type: 'integer', nullable: true, minimum: 0, maximum: MAX });

export const Project = Type.Object({ path: Path, createdAtMs: Time, createdBy: Name });
export const Principal = Type.Object({
  name: Name,
  kind: Kind,
  project: Path,
  disabled: Type.Boolean(),
  createdAtMs: Time,
  createdBy: Name,
});
export const Policy = Type.Object({
  id: Name,
  principal: Name,
  project: Path,
  grants: Grants,
  actions: Type.Array(Type.String()),
  expiresAtMs: optional(Time),
  createdAtMs: Time,
  grantedBy: Name,
});
const tokenFields = {
  id: Name,
  principal: Name,
  project: Path,
  grants: Grants,
  actions: Type.Array(Type.String()),
  note: optional(Type.String()),
  expiresAtMs: optional(Time),
  createdAtMs: Time,
  createdBy: Name,
  revokedAtMs: optional(Time),
};
export const Token = Type.Object(tokenFields);
export const MadeToken = Type.Object({
  ...tokenFields,
  secret: Type.String({ description: 'the token itself; it is told this once' }),
});
export const Quota = Type.Object({
  project: Path,
  limits: amounts('absent: no limit of its own', optional(Amount)),
  delegated: amounts('set aside by the quotas below', Amount),
  used: amounts('reserved here and below', Amount),
});
export const AuditRecord = Type.Object({
  id: Type.Integer(),
  atMs: Time,
  principal: Type.String(),
  tokenId: optional(Type.String()),
  action: Type.String(),
  project: Type.String(),
  target: optional(Type.String()),
  outcome: Type.String(),
  requestId: optional(Type.String()),
  detail: optional(Type.Record(Type.String(), Type.Unknown())),
});
export const WhoAmI = Type.Object({
  principal: Name,
  kind: Kind,
  project: Path,
  tokenId: Name,
  actions: Type.Array(Type.String(), { description: 'what the token lets through' }),
  expiresAtMs: optional(Time),
  policies: Type.Array(Policy),
});

export const ProjectBody = Type.Object({ path: Path }, strict);
export const PathQuery = Type.Object({ path: Path }, strict);
export const BelowQuery = Type.Object({ project: optional(Path) }, strict);
export const PrincipalBody = Type.Object({ name: Name, kind: Kind, project: optional(Path) }, strict);
export const DisabledBody = Type.Object({ disabled: Type.Boolean() }, strict);
export const NameParams = Type.Object({ name: Name });
export const IdParams = Type.Object({ id: Name });
export const PolicyBody = Type.Object(
  { principal: Name, project: Path, grants: Grants, expiresAtMs: optional(Time) },
  strict,
);
export const PolicyQuery = Type.Object({ project: optional(Path), principal: optional(Name) }, strict);
export const TokenBody = Type.Object(
  {
    principal: optional(Name),
    project: optional(Path),
    grants: optional(Grants),
    expiresAtMs: optional(Time),
    note: optional(Type.String({ minLength: 1, maxLength: 256 })),
  },
  strict,
);
export const TokenQuery = Type.Object(
  { project: optional(Path), principal: optional(Name), ended: optional(Type.Boolean()) },
  strict,
);
export const QuotaBody = Type.Object(
  {
    project: Path,
    limits: amounts('null takes a limit away', optional(AmountOrNull)),
  },
  strict,
);
export const AuditQuery = Type.Object(
  {
    project: optional(Path),
    principal: optional(Name),
    action: optional(Type.String({ minLength: 1, maxLength: 64 })),
    before: optional(Type.Integer({ minimum: 1, maximum: MAX })),
    limit: optional(Type.Integer({ minimum: 1, maximum: 1000 })),
  },
  strict,
);
