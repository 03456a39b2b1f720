/** docs/api-reference.md from the description that the apiserver gives of itself (/openapi.json): every operation with what it takes and gives. */

interface Schema {
  readonly $ref?: string;
  readonly type?: string | readonly string[];
  readonly const?: unknown;
  readonly enum?: readonly unknown[];
  readonly anyOf?: readonly Schema[];
  readonly items?: Schema;
  readonly properties?: Readonly<Record<string, Schema>>;
  readonly required?: readonly string[];
  readonly minimum?: number;
  readonly maximum?: number;
  readonly pattern?: string;
  readonly nullable?: boolean;
  readonly description?: string;
  readonly additionalProperties?: boolean | Schema;
}

interface Operation {
  readonly summary?: string;
  readonly description?: string;
  readonly tags?: readonly string[];
  readonly parameters?: readonly {
    readonly in: string;
    readonly name: string;
    readonly required?: boolean;
    readonly schema?: Schema;
  }[];
  readonly requestBody?: { readonly content?: Readonly<Record<string, { readonly schema?: Schema }>> };
  readonly responses?: Readonly<
    Record<string, { readonly content?: Readonly<Record<string, { readonly schema?: Schema }>> }>
  >;
}

export interface ApiDocument {
  readonly info: { readonly description?: string };
  readonly paths: Readonly<Record<string, Readonly<Record<string, Operation>>>>;
  readonly components?: { readonly schemas?: Readonly<Record<string, Schema>> };
}

const METHODS = ['get', 'post', 'put', 'delete'];

export function apiReference({ info, paths, components = {} }: ApiDocument): string {
  const lines = [
    '# The API',
    '',
    'What `/openapi.json` of the apiserver says, as a page; it is written from that. [sdk.md](sdk.md) has the libraries, [cluster.md](cluster.md) the services.',
    '',
    escaped(info.description ?? ''),
  ];
  const groups = new Map<string, string[]>();
  for (const [path, item] of Object.entries(paths).sort(([a], [b]) => (a < b ? -1 : 1))) {
    for (const method of METHODS) {
      const operation = item[method];
      if (operation === undefined) continue;
      const group = path.split('/')[2] ?? 'other';
      const text = groups.get(group) ?? [];
      groups.set(group, text);
      text.push(...operationText(method.toUpperCase(), path, operation));
    }
  }
  for (const [group, text] of [...groups].sort(([a], [b]) => (a < b ? -1 : 1))) lines.push('', `## ${group}`, ...text);
  const schemas = Object.entries(components.schemas ?? {});
  if (schemas.length > 0) lines.push('', '## Types');
  for (const [name, schema] of schemas.sort(([a], [b]) => (a < b ? -1 : 1))) {
    lines.push('', `### ${name}`, ...fieldsTable(schema));
  }
  return `${lines.join('\n')}\n`;
}

function operationText(method: string, path: string, operation: Operation): string[] {
  const { summary, description, parameters = [], requestBody, responses = {} } = operation;
  const lines = ['', `### ${method} ${path}`];
  if (summary !== undefined) lines.push('', escaped(`${summary}.`));
  if (description !== undefined) lines.push('', escaped(description));
  const query = parameters.filter((one) => one.in === 'query');
  if (query.length > 0) {
    lines.push('', 'Query:', '', '| | | |', '| --- | --- | --- |');
    for (const { name, required, schema = {} } of query) lines.push(row(name, required === true, schema));
  }
  for (const { schema } of Object.values(requestBody?.content ?? {})) {
    if (schema !== undefined) lines.push('', 'Body:', ...fieldsTable(schema));
  }
  for (const [status, answer] of Object.entries(responses)) {
    if (status === 'default') continue;
    for (const [type, { schema }] of Object.entries(answer.content ?? {})) {
      if (schema === undefined || Object.keys(schema).length === 0) continue;
      lines.push('', `Answer ${status}${type === 'application/json' ? '' : ` (${type})`}: ${typeText(schema)}`);
    }
  }
  return lines;
}

function fieldsTable(schema: Schema): string[] {
  const fields = Object.entries(schema.properties ?? {});
  if (fields.length === 0) return ['', typeText(schema)];
  const rows = fields.map(([name, field]) => row(name, schema.required?.includes(name) === true, field));
  return ['', '| | | |', '| --- | --- | --- |', ...rows];
}

function row(name: string, required: boolean, schema: Schema): string {
  return `| \`${name}\`${required ? ' (required)' : ''} | ${typeText(schema)} | ${escaped(schema.description ?? '')} |`;
}

function typeText(schema: Schema): string {
  const { $ref, type, anyOf, items, properties, minimum, maximum, pattern } = schema;
  const nullable = schema.nullable === true ? ' or null' : '';
  if ($ref !== undefined) return $ref.split('/').pop()!;
  if (schema.const !== undefined) return `\`${JSON.stringify(schema.const)}\``;
  if (schema.enum !== undefined) return schema.enum.map((one) => `\`${JSON.stringify(one)}\``).join(', ');
  if (anyOf !== undefined) return anyOf.map(typeText).join(' or ');
  if (type === 'array') return `list of ${typeText(items ?? {})}`;
  if (properties !== undefined) {
    const fields = Object.entries(properties).map(([name, field]) => {
      const optional = schema.required?.includes(name) === true ? '' : '?';
      return `\`${name}${optional}\`: ${typeText(field)}`;
    });
    return `{ ${fields.join(', ')} }${nullable}`;
  }
  const range = minimum === undefined && maximum === undefined ? '' : ` ${minimum ?? ''}..${maximum ?? ''}`;
  const form = pattern === undefined ? '' : ` like \`${pattern.replaceAll('|', '\\|')}\``;
  return `${[type ?? 'anything'].flat().join(' or ')}${range}${form}${nullable}`;
}

/** In a table cell, and with what looks like HTML as it is. */
function escaped(text: string): string {
  return text.replaceAll('|', '\\|').replaceAll('<', '&lt;').replaceAll('\n', ' ');
}
