/** A cluster that is none: nodes, sandboxes, images, projects in the shapes of the public API, the same each time, with names that mean harm. */

export const HOSTILE = '<img src=x onerror="window.harmed=1">';
const HOSTILE_NAMES = [
  HOSTILE,
  '"><script>window.harmed=1</script>',
  '\u202Egnp.exe',
  "'; alert(1) //",
  'a'.repeat(120),
];
const GIB = 2 ** 30;
const USERS = ['ana', 'bruno', 'chen', 'dara', 'eva', 'farid', HOSTILE];
const JOBS = ['swe-rl-41', 'swe-rl-42', 'eval-nightly', 'web-agents', ''];
const PROJECTS = ['root/research', 'root/research/rl', 'root/research/rl/swe', 'root/eval', 'root/eval/nightly'];
const IMAGES = ['swe/django:4.2', 'swe/sympy:1.12', 'web/chromium:126', 'base/python:3.12', `${HOSTILE}:1`];
/** Fixed, so that pictures look alike. */
export const NOW = Date.now();

/** A random number generator that gives the same each time (mulberry32). */
function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

export interface MadeNode {
  readonly edge: string;
  readonly url: string;
  readonly labels: string[];
  alive: boolean;
  readonly heardMsAgo: number;
  readonly report: { state: string } & Record<string, unknown>;
}

export function madeNodes(count = 160): MadeNode[] {
  const next = random(7);
  return Array.from({ length: count }, (_, i) => {
    const edge = `edge-${String(i + 1).padStart(3, '0')}`;
    const busy = Math.min(0.99, 0.15 + 0.55 * next() + (next() > 0.88 ? 0.4 : 0));
    const dead = i === 41 || i === 117;
    const draining = i === 12 || i === 77;
    const load = {
      cpu: busy * (0.55 + next() * 0.45),
      memory: Math.min(0.98, busy + 0.1 * next()),
      disk: 0.2 + 0.5 * next(),
    };
    const sandboxes = Math.round(busy * 1500);
    return {
      edge,
      url: `http://10.20.${Math.floor(i / 250)}.${(i % 250) + 1}:8600`,
      labels: i % 20 === 0 ? ['synced', HOSTILE] : ['zone-a'],
      alive: !dead,
      heardMsAgo: dead ? 84_000 : Math.round(next() * 1900),
      report: {
        edge,
        epoch: 'e1',
        admitted: 5000 + i,
        state: dead ? 'dead' : draining ? 'draining' : 'healthy',
        backends: { container: { sandboxes, limit: 1500 } },
        labels: i % 8 === 0 ? ['gpu'] : [],
        capacity: { cpuMilli: 768_000, memoryBytes: 768 * GIB, diskBytes: 7000 * GIB, gpus: i % 8 === 0 ? 8 : 0 },
        reserved: {
          cpuMilli: Math.round(768_000 * busy),
          memoryBytes: Math.round(768 * GIB * busy),
          diskBytes: Math.round(7000 * GIB * load.disk),
          gpus: 0,
        },
        load,
        users: Object.fromEntries(USERS.map((user, k) => [user, Math.round(sandboxes / (k + 2))])),
        jobs: Object.fromEntries(JOBS.filter(Boolean).map((job, k) => [job, Math.round(sandboxes / (k + 3))])),
        layers: Array.from({ length: 40 }, (_, k) => `sha256:${k}`),
      },
    };
  });
}

export interface MadeSandbox extends Record<string, unknown> {
  readonly id: string;
  readonly name: string;
  readonly edge: string;
  state: string;
}

export function madeSandboxes(count = 10_000): MadeSandbox[] {
  const next = random(11);
  const one = <T>(list: readonly T[]) => list[Math.floor(next() * list.length)]!;
  return Array.from({ length: count }, (_, i) => {
    const edge = `edge-${String((i % 160) + 1).padStart(3, '0')}`;
    // The youngest, so that they stand at the top.
    const name = HOSTILE_NAMES[i] ?? `box-${String(i).padStart(5, '0')}`;
    const state = next() < 0.92 ? 'running' : next() < 0.8 ? 'paused' : 'ended';
    const image = IMAGES[i % 50 === 0 ? 4 : i % 4]!;
    return {
      id: `${name}.${edge}`,
      name,
      edge,
      state,
      end:
        state === 'ended'
          ? { reason: 'expired', detail: 'its time was up', at: new Date(NOW - 5000).toISOString() }
          : undefined,
      project: one(PROJECTS),
      user: i === 1 ? HOSTILE : one(USERS.slice(0, 6)),
      job: one(JOBS),
      createdAt: new Date(NOW - 20_000 - i * 1700).toISOString(),
      expiresAt: new Date(NOW + 3_600_000 + Math.floor(next() * 7_000_000)).toISOString(),
      backend: 'container',
      base: { name: image, digest: `sha256:${'ab'.repeat(32)}` },
      toolkits: [],
      limits: { cpus: one([0.5, 1, 2, 4]), memoryBytes: one([0.5, 1, 2, 4, 8]) * GIB, pids: 4096, diskBytes: 10 * GIB },
      network: {
        mode: 'policy',
        ipv4: '10.64.3.7',
        policy: {
          default: 'deny',
          rules: [
            { allow: '*.debian.org', ports: [80, 443], protocol: 'tcp' },
            { allow: '10.2.0.0/16', ports: ['8000-8100'] },
            { deny: HOSTILE },
          ],
          services: { pypi: true, npm: false },
        },
      },
      class: 'ls',
      runningCommands: Math.floor(next() * 3),
    };
  });
}

export function madeDenied(sandbox?: string): Record<string, unknown>[] {
  const next = random(sandbox === undefined ? 3 : 5);
  const targets = ['169.254.169.254', '8.8.8.8', '140.82.121.4', 'api.example.com', HOSTILE, '2606:4700::6810:84e5'];
  return Array.from({ length: sandbox === undefined ? 400 : 60 }, (_, i) => ({
    sandbox:
      sandbox ??
      `box-${String(Math.floor(next() * 9000) + 10).padStart(5, '0')}.edge-${String(Math.floor(next() * 160) + 1).padStart(3, '0')}`,
    time: new Date(NOW - i * 7000).toISOString(),
    kind: i % 5 === 3 ? 'name' : 'packet',
    destination: targets[i % targets.length],
    port: i % 5 === 3 ? undefined : [80, 443, 22, 53][i % 4],
    protocol: i % 5 === 3 ? 'A' : i % 7 === 0 ? 'udp' : 'tcp',
    reason: ['no rule allows it', 'closed by the node', 'the policy denies it'][i % 3],
    program: ['curl', 'python3', 'pip', HOSTILE.slice(0, 15)][i % 4],
    pid: 1000 + i,
    uid: i % 3 === 0 ? 0 : 1000,
    count: 1 + Math.floor(next() * 40),
  }));
}

export function madeImages(): Record<string, unknown>[] {
  const next = random(19);
  const names = [...IMAGES, ...Array.from({ length: 300 }, (_, i) => `swe/task-${String(i + 1).padStart(4, '0')}:1`)];
  return names.map((name, i) => ({
    name,
    kind: i % 23 === 7 ? 'toolkit' : i % 17 === 5 ? 'workspace' : 'base',
    digest: `sha256:${Math.floor(next() * 2 ** 48)
      .toString(16)
      .padStart(12, '0')
      .repeat(6)
      .slice(0, 64)}`,
    layers: 1 + Math.floor(next() * 5),
    metaBytes: Math.round(next() * 40 * 2 ** 20),
    dataBytes: Math.round(next() * 6 * GIB),
    ...(i === 9 ? { problem: 'the manifest is damaged' } : {}),
  }));
}

export function madeImage(name: string): Record<string, unknown> {
  const hex = (c: string) => `sha256:${c.repeat(64)}`;
  const layer = (c: string, meta: number, data: number, own: boolean, sharedWith: string[]) => ({
    meta: { digest: hex(c), sizeBytes: meta },
    devices: [{ digest: hex(c), sizeBytes: data, chunkDigests: hex(c) }],
    own,
    sharedWith,
  });
  return {
    name,
    kind: 'base',
    digest: hex('d'),
    ownLayers: 2,
    base: hex('b'),
    layers: [
      layer('1', 9 << 20, 1.4 * GIB, false, [HOSTILE, 'swe/sympy:1.12']),
      layer('2', 4 << 20, 0.6 * GIB, true, ['web/chromium:126']),
      layer('3', 1 << 20, 120 << 20, true, []),
    ],
  };
}

export function madeStats(name: string): Record<string, unknown> {
  const next = random(23);
  const chunk = 256 << 10;
  const blob = (layer: number, chunks: number) => {
    let heat = 0;
    const text = Array.from({ length: chunks }, () => {
      if (next() > 0.93) heat = next() > 0.75 ? (next() > 0.4 ? 2 : 1) : 0;
      return String(heat);
    }).join('');
    const of = (digit: string) => [...text].filter((c) => c === digit).length * chunk;
    return {
      digest: `sha256:${String(layer).repeat(64)}`,
      layer,
      from: 'server',
      sizeBytes: chunks * chunk,
      readBytes: of('2'),
      prefetchedBytes: of('1'),
      coldBytes: of('0'),
      chunks: text,
    };
  };
  const blobs = [blob(1, 5600), blob(2, 2400), blob(3, 480)];
  const sum = (key: 'sizeBytes' | 'readBytes' | 'prefetchedBytes' | 'coldBytes') =>
    blobs.reduce((all, one) => all + one[key], 0);
  const totals = {
    sizeBytes: sum('sizeBytes'),
    readBytes: sum('readBytes'),
    prefetchedBytes: sum('prefetchedBytes'),
    coldBytes: sum('coldBytes'),
  };
  const directories = ['/', '/usr', '/opt', '/var', `/${HOSTILE}`].map((path, i) => ({
    path,
    sizeBytes: Math.round(totals.sizeBytes / (i + 1)),
    readBytes: Math.round(totals.readBytes / (i * 2 + 1)),
    prefetchedBytes: 0,
    coldBytes: 0,
  }));
  return { name, digest: 'sha256:dd', from: 'server', ...totals, blobs, directories };
}

const TREE = ['root', ...PROJECTS, 'root/research/vision', 'root/web', `root/web/${HOSTILE.replaceAll('/', '')}`];

export function madeProjects(): Record<string, unknown>[] {
  return TREE.map((path) => ({ path, createdAtMs: NOW - 9e8, createdBy: 'admin' }));
}

export function madeQuotas(): Record<string, unknown>[] {
  const next = random(31);
  return TREE.map((project, i) => {
    const scale = 1 / (1 + project.split('/').length);
    const limits = {
      sandboxes: Math.round(30_000 * scale),
      cpuMilli: Math.round(6e7 * scale),
      memoryBytes: Math.round(9e4 * scale) * GIB,
      diskBytes: Math.round(9e5 * scale) * GIB,
    };
    const share = [0.4, 0.62, 0.9, 0.97, 0.35, 0.1, 0, 0.2, 0.5][i] ?? 0.3;
    const part = (of: Record<string, number>, by: number) =>
      Object.fromEntries(
        Object.entries(of).map(([key, value]) => [key, Math.round(value * Math.min(1, by * (0.9 + next() * 0.2)))]),
      );
    return {
      project,
      limits: i === 6 ? {} : limits,
      used: part(limits, share),
      delegated: i < 4 ? part(limits, 0.7) : part(limits, 0),
    };
  });
}

export function madeAudit(): Record<string, unknown>[] {
  const actions = ['sandbox.create', 'sandbox.exec', 'sandbox.manage', 'token.admin', 'node.drain', 'quota.admin'];
  return Array.from({ length: 300 }, (_, i) => ({
    id: 1000 - i,
    atMs: NOW - i * 4300,
    principal: USERS[i % USERS.length],
    action: actions[i % actions.length],
    project: PROJECTS[i % PROJECTS.length],
    target: i % 3 === 0 ? `box-${10_000 + i}.edge-012` : HOSTILE,
    outcome: i % 11 === 4 ? 'denied' : i % 29 === 5 ? 'failed' : 'done',
    detail: { what: HOSTILE, count: i },
  }));
}
