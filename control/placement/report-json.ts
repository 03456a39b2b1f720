/** A node's report as JSON, on its way from edge to watcher to whoever places: maps as objects, sets as arrays, gone fields absent. */
import { fail } from '../errors.ts';
import { type Amounts, RESOURCES } from './amounts.ts';
import type { BackendName, BackendUse, GpuUse, NodeReport } from './node-report.ts';

export interface NodeReportJson {
  readonly edge: string;
  readonly epoch: string;
  readonly admitted: number;
  readonly state: NodeReport['state'];
  readonly backends: Readonly<Partial<Record<BackendName, BackendUse>>>;
  readonly labels: readonly string[];
  readonly capacity: Amounts;
  readonly reserved: Amounts;
  readonly gpuKinds?: Readonly<Record<string, GpuUse>>;
  readonly load: NodeReport['load'];
  readonly users: Readonly<Record<string, number>>;
  readonly jobs: Readonly<Record<string, number>>;
  readonly heldBy?: string;
  readonly layers: readonly string[];
}

export function reportToJson(report: NodeReport): NodeReportJson {
  const { backends, labels, gpuKinds, users, jobs, layers, ...rest } = report;
  return {
    ...rest,
    ...(gpuKinds === undefined ? {} : { gpuKinds: Object.fromEntries(gpuKinds) }),
    backends: Object.fromEntries(backends),
    labels: [...labels],
    users: Object.fromEntries(users),
    jobs: Object.fromEntries(jobs),
    layers: [...layers],
  };
}

/** What came over the wire. @throws SERVICE_REPORT */
export function reportFromJson(value: unknown): NodeReport {
  const problem = problemOf(value);
  if (problem !== undefined) throw fail('SERVICE_REPORT', { problem });
  const { backends, labels, gpuKinds, users, jobs, layers, ...rest } = value as NodeReportJson;
  return {
    ...rest,
    heldBy: rest.heldBy,
    gpuKinds: gpuKinds === undefined ? undefined : new Map(Object.entries(gpuKinds)),
    backends: new Map(Object.entries(backends) as [BackendName, BackendUse][]),
    labels: new Set(labels),
    users: new Map(Object.entries(users)),
    jobs: new Map(Object.entries(jobs)),
    layers: new Set(layers),
  };
}

const isCount = (value: unknown) => typeof value === 'number' && value >= 0 && Number.isFinite(value);
const isText = (value: unknown) => typeof value === 'string';
const isRecord = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null && !Array.isArray(value);
const areAmounts = (value: unknown) => isRecord(value) && RESOURCES.every((resource) => isCount(value[resource]));
const areTexts = (value: unknown) => Array.isArray(value) && value.every(isText);
const areCounts = (value: unknown) => isRecord(value) && Object.values(value).every(isCount);

function problemOf(value: unknown): string | undefined {
  if (!isRecord(value)) return 'it is no object';
  const { edge, epoch, admitted, state, backends, labels, capacity, reserved, load, users, jobs, heldBy, layers } =
    value;
  const { gpuKinds } = value;
  const checks: Readonly<Record<string, boolean>> = {
    edge: isText(edge),
    epoch: isText(epoch),
    admitted: Number.isSafeInteger(admitted) && isCount(admitted),
    state: state === 'healthy' || state === 'draining' || state === 'dead',
    backends:
      isRecord(backends) &&
      Object.values(backends).every((use) => isRecord(use) && isCount(use.sandboxes) && isCount(use.limit)),
    labels: areTexts(labels),
    capacity: areAmounts(capacity),
    reserved: areAmounts(reserved),
    gpuKinds:
      gpuKinds === undefined ||
      (isRecord(gpuKinds) &&
        Object.values(gpuKinds).every((use) => isRecord(use) && isCount(use.cards) && isCount(use.free))),
    load: isRecord(load) && ['cpu', 'memory', 'disk'].every((what) => isCount(load[what])),
    users: areCounts(users),
    jobs: areCounts(jobs),
    heldBy: heldBy === undefined || isText(heldBy),
    layers: areTexts(layers),
  };
  const wrong = Object.keys(checks).filter((name) => !checks[name]);
  return wrong.length === 0 ? undefined : `${wrong.join(', ')} is missing or of the wrong kind`;
}
