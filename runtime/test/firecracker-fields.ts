/**
 * What Firecracker's API takes, of what we ask it for: facts of its published description (src/firecracker/swagger/firecracker.yaml, 1.14 to 1.17). A test
 * holds the requests that we make against this table, and the table against the description where there is one ($FIRECRACKER_API).
 */

export type FieldType = 'string' | 'integer' | 'boolean' | 'array' | { readonly [field: string]: Field };
export interface Field {
  readonly type: FieldType;
  readonly required?: true;
  readonly values?: readonly string[];
}

const text: Field = { type: 'string' };
const number: Field = { type: 'integer' };
const flag: Field = { type: 'boolean' };
const must = (field: Field): Field => ({ ...field, required: true });

const bucket: Field = { type: { size: must(number), refill_time: must(number), one_time_burst: number } };
const rateLimiter: Field = { type: { bandwidth: bucket, ops: bucket } };

/** Request → body. */
export const FIRECRACKER_FIELDS: Readonly<Record<string, Readonly<Record<string, Field>>>> = {
  'PUT /machine-config': {
    vcpu_count: must(number),
    mem_size_mib: must(number),
    smt: flag,
    track_dirty_pages: flag,
    huge_pages: { type: 'string', values: ['None', '2M', 'Transparent'] },
  },
  'PUT /boot-source': { kernel_image_path: must(text), initrd_path: text, boot_args: text },
  'PUT /drives/{drive_id}': {
    drive_id: must(text),
    is_root_device: must(flag),
    path_on_host: text,
    is_read_only: flag,
    cache_type: { type: 'string', values: ['Unsafe', 'Writeback'] },
    io_engine: { type: 'string', values: ['Sync', 'Async'] },
    rate_limiter: rateLimiter,
  },
  'PATCH /drives/{drive_id}': { drive_id: must(text), path_on_host: text, rate_limiter: rateLimiter },
  'PUT /pmem/{id}': { id: must(text), path_on_host: must(text), root_device: flag, read_only: flag },
  'PATCH /pmem/{id}': { id: must(text), rate_limiter: rateLimiter },
  'PUT /network-interfaces/{iface_id}': {
    iface_id: must(text),
    host_dev_name: must(text),
    guest_mac: text,
    rx_rate_limiter: rateLimiter,
    tx_rate_limiter: rateLimiter,
  },
  'PUT /vsock': { guest_cid: must(number), uds_path: must(text) },
  'PUT /balloon': {
    amount_mib: must(number),
    deflate_on_oom: must(flag),
    stats_polling_interval_s: number,
    free_page_reporting: flag,
    free_page_hinting: flag,
  },
  'PATCH /balloon': { amount_mib: must(number) },
  'PUT /entropy': { rate_limiter: rateLimiter },
  'PUT /actions': {
    action_type: { type: 'string', required: true, values: ['FlushMetrics', 'InstanceStart', 'SendCtrlAltDel'] },
  },
  'PATCH /vm': { state: { type: 'string', required: true, values: ['Paused', 'Resumed'] } },
  'PUT /snapshot/create': {
    mem_file_path: must(text),
    snapshot_path: must(text),
    snapshot_type: { type: 'string', values: ['Full', 'Diff'] },
  },
  'PUT /snapshot/load': {
    snapshot_path: must(text),
    mem_backend: {
      type: { backend_type: { type: 'string', required: true, values: ['File', 'Uffd'] }, backend_path: must(text) },
    },
    track_dirty_pages: flag,
    resume_vm: flag,
    network_overrides: { type: 'array' },
  },
};

/** `PUT /drives/up` → `PUT /drives/{drive_id}`. */
export function patternOf(method: string, path: string): string {
  const [, first, second] = path.split('/');
  const name = Object.keys(FIRECRACKER_FIELDS).find((key) => {
    const [verb, pattern] = key.split(' ') as [string, string];
    const [, one, two] = pattern.split('/');
    return verb === method && one === first && (two?.startsWith('{') ? second !== undefined : two === second);
  });
  return name ?? `${method} ${path}`;
}

/** What is wrong with a body, in words; empty: nothing. */
export function problemsOf(body: unknown, fields: Readonly<Record<string, Field>>, at = 'body'): string[] {
  if (typeof body !== 'object' || body === null) return [`${at} is no object`];
  const problems: string[] = [];
  for (const [name, { required }] of Object.entries(fields)) {
    if (required && !(name in body)) problems.push(`${at}.${name} is missing`);
  }
  for (const [name, value] of Object.entries(body)) {
    const field = fields[name];
    const path = `${at}.${name}`;
    if (field === undefined) problems.push(`${path} is not known`);
    else if (typeof field.type === 'object') problems.push(...problemsOf(value, field.type, path));
    else if (!isOfType(value, field.type)) problems.push(`${path} is no ${field.type}`);
    else if (field.values !== undefined && !field.values.includes(String(value))) problems.push(`${path}: ${value}`);
  }
  return problems;
}

function isOfType(value: unknown, type: 'string' | 'integer' | 'boolean' | 'array'): boolean {
  if (type === 'integer') return Number.isSafeInteger(value);
  if (type === 'array') return Array.isArray(value);
  return typeof value === type;
}
