/**
 * The form of the database, step by step. A step that was released is never changed: the next one changes what it made. Each runs in one
 * transaction, written in what SQLite and PostgreSQL both speak; `binary` and the few other words differ.
 */
export interface Words {
  /** Texts compared byte by byte, so that all paths below one are a range. */
  readonly binary: string;
  readonly counter: string;
  /** A table that is its own primary index. */
  readonly clustered: string;
  /** Statements that make a table refuse UPDATE and DELETE. */
  appendOnly(table: string): readonly string[];
}

export interface Migration {
  readonly number: number;
  readonly name: string;
  statements(words: Words): readonly string[];
}

const AMOUNTS = ['sandboxes', 'cpu_milli', 'memory_bytes', 'disk_bytes'];
const amounts = (prefix: string, rest: string) => AMOUNTS.map((name) => `${prefix}${name} BIGINT ${rest}`).join(', ');

export const migrations: readonly Migration[] = [
  {
    number: 1,
    name: 'projects, principals, policies, tokens, reservations, audit',
    statements: ({ binary, counter, clustered, appendOnly }) => [
      `CREATE TABLE iam_projects (
        path TEXT ${binary} PRIMARY KEY,
        parent TEXT ${binary},
        created_at BIGINT NOT NULL,
        created_by TEXT NOT NULL,
        ${amounts('limit_', 'NULL')},
        ${amounts('delegated_', 'NOT NULL DEFAULT 0')},
        ${amounts('used_', 'NOT NULL DEFAULT 0')}
      )`,
      'CREATE INDEX iam_projects_parent ON iam_projects (parent)',
      `CREATE TABLE iam_principals (
        name TEXT ${binary} PRIMARY KEY,
        kind TEXT NOT NULL,
        project TEXT ${binary} NOT NULL,
        disabled INTEGER NOT NULL DEFAULT 0,
        created_at BIGINT NOT NULL,
        created_by TEXT NOT NULL
      )`,
      'CREATE INDEX iam_principals_project ON iam_principals (project)',
      `CREATE TABLE iam_policies (
        id TEXT ${binary} PRIMARY KEY,
        principal TEXT ${binary} NOT NULL,
        project TEXT ${binary} NOT NULL,
        grants TEXT NOT NULL,
        expires_at BIGINT,
        created_at BIGINT NOT NULL,
        granted_by TEXT NOT NULL
      )`,
      'CREATE INDEX iam_policies_principal ON iam_policies (principal)',
      'CREATE INDEX iam_policies_project ON iam_policies (project)',
      `CREATE TABLE iam_tokens (
        id TEXT ${binary} PRIMARY KEY,
        hash TEXT ${binary} NOT NULL UNIQUE,
        principal TEXT ${binary} NOT NULL,
        project TEXT ${binary} NOT NULL,
        grants TEXT NOT NULL,
        note TEXT,
        expires_at BIGINT,
        created_at BIGINT NOT NULL,
        created_by TEXT NOT NULL,
        revoked_at BIGINT
      )`,
      'CREATE INDEX iam_tokens_project ON iam_tokens (project)',
      `CREATE TABLE iam_reservations (
        id TEXT ${binary} PRIMARY KEY,
        project TEXT ${binary} NOT NULL,
        user_name TEXT NOT NULL,
        request_id TEXT ${binary},
        ${amounts('', 'NOT NULL')},
        placed INTEGER NOT NULL DEFAULT 0,
        edge TEXT ${binary},
        sandbox TEXT,
        recorded_at BIGINT NOT NULL
      ) ${clustered}`,
      'CREATE UNIQUE INDEX iam_reservations_request ON iam_reservations (project, request_id) WHERE request_id IS NOT NULL',
      'CREATE INDEX iam_reservations_edge ON iam_reservations (edge) WHERE edge IS NOT NULL',
      `CREATE TABLE iam_audit (
        id ${counter},
        at BIGINT NOT NULL,
        principal TEXT NOT NULL,
        token_id TEXT,
        action TEXT NOT NULL,
        project TEXT ${binary} NOT NULL,
        target TEXT,
        outcome TEXT NOT NULL,
        request_id TEXT,
        detail TEXT
      )`,
      'CREATE INDEX iam_audit_project ON iam_audit (project, id)',
      ...appendOnly('iam_audit'),
    ],
  },
  {
    number: 2,
    name: 'request ids of what was released',
    statements: ({ binary }) => [
      `CREATE TABLE iam_released (
        project TEXT ${binary} NOT NULL,
        request_id TEXT ${binary} NOT NULL,
        id TEXT ${binary} NOT NULL,
        edge TEXT ${binary},
        sandbox TEXT,
        released_at BIGINT NOT NULL,
        PRIMARY KEY (project, request_id)
      )`,
      'CREATE INDEX iam_released_at ON iam_released (released_at)',
    ],
  },
];
