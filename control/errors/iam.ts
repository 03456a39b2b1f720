/** Of accounts, tokens and quotas. Kept alphabetical. */

export const iamErrors = {
  IAM_BAD_REQUEST: {
    message: '{problem}',
    hint: 'docs/iam.md has the names and values that are taken',
    exit: 2,
    http: 400,
  },
  IAM_BEYOND: {
    message: '{action} on {project}: {principal} cannot give what he does not have himself: {why}',
    hint: 'GET /v1/whoami says what the token and the policies of its principal allow, and until when',
    exit: 5,
    http: 403,
  },
  IAM_DATABASE: {
    message: 'the database of accounts and quotas, {database}: {problem}',
    hint: 'is it running, reachable, and is there space on its disk? Nothing was changed, or it is undone by itself',
    retryable: true,
    exit: 6,
    http: 503,
  },
  IAM_DATABASE_NEWER: {
    message: '{database} is of a newer dsec: it is at step {theirs}, this version knows {ours}',
    hint: 'use that version or a newer one; older ones cannot read what it wrote',
    exit: 1,
    http: 500,
  },
  IAM_DENIED: {
    message: '{principal} may not do {action} on {project}',
    hint: 'the token and a policy of its principal both have to allow it; ask who has policy.admin there',
    exit: 5,
    http: 403,
  },
  IAM_EXISTS: {
    message: '{what} is there already',
    hint: 'choose another name',
    exit: 1,
    http: 409,
  },
  IAM_LAST_ADMIN: {
    message: '{principal} is the last who may do everything on root without an end',
    hint: 'give somebody else the role admin on root first',
    exit: 1,
    http: 409,
  },
  IAM_NOT_EMPTY: {
    message: 'project {project} still has {what}',
    hint: 'remove or stop those first',
    exit: 1,
    http: 409,
  },
  IAM_NOT_FOUND: {
    message: 'there is no {what}',
    hint: 'check the name; lists show only what you may see',
    exit: 4,
    http: 404,
  },
  IAM_NO_SQLITE: {
    message: 'better-sqlite3, which keeps accounts and quotas, is not built: {problem}',
    hint: 'apt-get install g++ make python3, then `npm ci`; or use PostgreSQL',
    exit: 5,
    http: 501,
  },
  IAM_QUOTA: {
    message: 'project {project} has {used} of {limit} {resource} in use; {asked} more are over its quota',
    hint: 'stop sandboxes there or below, or have the quota raised by who has quota.admin above it',
    retryable: true,
    exit: 1,
    http: 429,
  },
  IAM_QUOTA_DELEGATED: {
    message: 'project {project} has handed down {delegated} {resource}, more than {limit}',
    hint: 'lower the quotas of the projects below it first',
    exit: 1,
    http: 409,
  },
  IAM_QUOTA_PARENT: {
    message: 'the quotas below {project} would come to {delegated} {resource}, its own is {limit}',
    hint: 'give less, or have its own quota raised first',
    exit: 1,
    http: 409,
  },
  IAM_RESERVATION_GONE: {
    message: 'reservation {id} does not wait for an edge any more: it was released, or placed before',
    hint: 'reserve again; what was started for it has to be removed',
    retryable: true,
    exit: 1,
    http: 409,
  },
  IAM_TOKEN_INVALID: {
    message: 'the token is not valid',
    hint: 'none was sent, or it is mistyped, expired, revoked, or of a principal that is disabled; ask for another one',
    exit: 5,
    http: 401,
  },
} as const;
