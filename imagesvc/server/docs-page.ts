/** The OpenAPI document as one page of HTML: no script, nothing loaded from elsewhere. */

interface Operation {
  readonly summary?: string;
  readonly description?: string;
  readonly tags?: readonly string[];
  readonly parameters?: readonly {
    readonly name: string;
    readonly in: string;
    readonly required?: boolean;
    readonly description?: string;
    readonly schema?: unknown;
  }[];
  readonly requestBody?: { readonly content?: Readonly<Record<string, { readonly schema?: unknown }>> };
  readonly responses?: Readonly<
    Record<string, { readonly description?: string; readonly content?: Readonly<Record<string, unknown>> }>
  >;
  readonly 'x-role'?: string;
}

const METHODS = ['get', 'post', 'put', 'delete', 'head'] as const;

export function docsPage(document: object): string {
  const { info, paths = {} } = document as {
    info: { title: string; version: string; description?: string };
    paths?: Record<string, Record<string, Operation>>;
  };
  const byTag = new Map<string, string[]>();
  for (const [path, item] of Object.entries(paths)) {
    for (const method of METHODS) {
      const operation = item[method];
      if (operation === undefined) continue;
      const tag = operation.tags?.[0] ?? 'other';
      byTag.set(tag, [...(byTag.get(tag) ?? []), operationHtml(method, path, operation)]);
    }
  }
  const sections = [...byTag].map(([tag, operations]) => `<h2>${text(tag)}</h2>\n${operations.join('\n')}`).join('\n');
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>${text(info.title)}</title>
<meta name="viewport" content="width=device-width">
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
details{border:1px solid #ccc;border-radius:4px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}code,pre{font:13px ui-monospace,monospace}pre{background:#f5f5f5;padding:.6rem;overflow:auto}
.method{display:inline-block;width:4.5rem;font-weight:600}.role{float:right;color:#777}td{padding:.1rem .8rem .1rem 0;vertical-align:top}
</style></head><body>
<h1>${text(info.title)} ${text(info.version)}</h1>
<p>${text(info.description ?? '')} The same as JSON: <a href="/openapi.json">/openapi.json</a>.</p>
${sections}
</body></html>
`;
}

function operationHtml(method: string, path: string, operation: Operation): string {
  const { summary = '', description = '', parameters = [], requestBody, responses = {} } = operation;
  const rows = parameters.map(
    (parameter) =>
      `<tr><td><code>${text(parameter.name)}</code></td><td>${text(parameter.in)}${parameter.required ? ', required' : ''}</td><td>${text(parameter.description ?? '')}</td></tr>`,
  );
  const bodies = Object.entries(requestBody?.content ?? {}).map(
    ([type, { schema }]) => `<p>Body, ${text(type)}:</p><pre>${text(JSON.stringify(schema, null, 1))}</pre>`,
  );
  const answers = Object.entries(responses).map(
    ([status, { description: what = '', content = {} }]) =>
      `<tr><td><code>${text(status)}</code></td><td>${text(what)}</td><td>${text(Object.keys(content).join(', '))}</td></tr>`,
  );
  return `<details><summary><span class="role">${text(operation['x-role'] ?? '')}</span><span class="method">${method.toUpperCase()}</span><code>${text(path)}</code> ${text(summary)}</summary>
<p>${text(description)}</p><table>${rows.join('')}</table>${bodies.join('')}<table>${answers.join('')}</table></details>`;
}

function text(value: string): string {
  return value.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
}
