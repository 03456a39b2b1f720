/**
 * What each backend can do, in one place: sandboxes refuse by it, docs/backends.md shows it, the conformance suite runs what it says there is and
 * expects RUNTIME_UNSUPPORTED for the rest. A backend that gains something gains it here first.
 */
import type { Capability } from './capabilities.ts';

export const BACKENDS = ['container', 'fncall', 'microvm', 'vm'] as const;
export type Backend = (typeof BACKENDS)[number];

/** `true`: always. `agent`: where a guest agent answers (docs/vm.md). `task`: as a task, one that stands for itself (docs/fncall.md). */
export type Support = boolean | 'agent' | 'task';

export interface CapabilityRow {
  /** For people. */
  readonly title: string;
  readonly container: Support;
  readonly fncall: Support;
  readonly microvm: Support;
  readonly vm: Support;
}

const row = (title: string, container: Support, fncall: Support, microvm: Support, vm: Support): CapabilityRow => ({
  title,
  container,
  fncall,
  microvm,
  vm,
});

export const BACKEND_TABLE: Readonly<Record<Capability, CapabilityRow>> = {
  resident: row('sandboxes that stay, until they are stopped', true, false, true, true),
  tasks: row('tasks: code in, results out', false, true, false, false),
  composition: row('workspace and toolkits over an image', true, true, true, false),
  environment: row('environment, user and folder of commands', true, 'task', true, 'agent'),
  exec: row('commands', true, 'task', true, 'agent'),
  terminal: row('commands on a terminal', true, false, true, false),
  sessions: row('shell sessions', true, false, true, false),
  files: row('files, read and written', true, 'task', true, 'agent'),
  watch: row('folders that are watched', true, false, true, false),
  ports: row('connections to ports inside', true, false, true, false),
  pause: row('pause and resume', true, false, true, true),
  fork: row('fork', true, false, true, true),
  'fork-memory': row('fork with its memory', false, false, true, true),
  'pack-diff': row('an image of its changes', true, false, true, false),
  classes: row('service classes', true, false, true, true),
  'cpu-limit': row('limit of processors', true, false, true, true),
  'memory-limit': row('limit of memory', true, 'task', true, true),
  'pids-limit': row('limit of processes', true, 'task', true, false),
  'io-limit': row('limits of reading and writing', true, false, false, false),
  'disk-limit': row('limit of the disk', true, 'task', true, false),
  update: row('limits changed while it runs', true, false, true, false),
  usage: row('what it uses', true, 'task', true, true),
  'network-policy': row('a network with rules', true, false, true, true),
  'host-network': row("the machine's own network", true, false, false, false),
  screen: row('pictures of a screen, keyboard, mouse, VNC', false, false, false, true),
  console: row('a serial console', false, false, false, true),
  clipboard: row("the screen's clipboard", false, false, false, 'agent'),
};

/** Of sandboxes of a backend that is there without any guest agent. */
export function featuresOf(backend: Backend): ReadonlySet<Capability> {
  const all = Object.entries(BACKEND_TABLE) as [Capability, CapabilityRow][];
  return new Set(all.filter(([, one]) => one[backend] === true).map(([capability]) => capability));
}

/** What a guest agent adds to them. */
export function featuresWithAgent(backend: Backend): ReadonlySet<Capability> {
  const all = Object.entries(BACKEND_TABLE) as [Capability, CapabilityRow][];
  return new Set(
    all.filter(([, one]) => one[backend] === true || one[backend] === 'agent').map(([capability]) => capability),
  );
}
