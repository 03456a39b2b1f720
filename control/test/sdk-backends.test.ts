/** Both libraries over all backends: control/sdk/backend-scenarios.json, the same calls with nothing but the backend's name changed. */
import { execFile, execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { fullVmProblem, microvmSupport } from '#runtime';
import { DSecClient, DSecError } from '../sdk/typescript/src/index.ts';
import { pythonWithLibdsec } from './sdk/python-environment.ts';
import { check, errorView, type ScenarioStep, takeStep } from './sdk/scenario-checks.ts';
import type { Site } from './sdk/scenario-steps.ts';
import { canRun, IMAGE, makeWorld, root, type World } from './sdk/world.ts';

const run = promisify(execFile);
const file = join(root, 'control/sdk/backend-scenarios.json');

interface BackendScenario {
  readonly name: string;
  readonly backends: readonly ('container' | 'fncall' | 'microvm' | 'vm')[];
  readonly image: 'container' | 'disk';
  readonly steps?: readonly ScenarioStep[];
  /** By the creation. */
  readonly raises?: Readonly<Record<string, unknown>>;
}

const scenarios = JSON.parse(fs.readFileSync(file, 'utf8')) as BackendScenario[];

/** The kernel of the lab, where `dsec vm kernel` has fetched none. */
function findKernel(): void {
  const lab = join(process.env.DSEC_LAB_CACHE ?? join(homedir(), '.cache/dsec/lab'), 'kernels');
  const found = fs.existsSync(lab) ? fs.readdirSync(lab).filter((name) => name.startsWith('6.12.')) : [];
  if (found.length > 0) process.env.DSEC_VM_KERNEL ??= join(lab, found.sort().at(-1)!);
}

if (canRun) findKernel();
const problems: Readonly<Record<string, string | undefined>> = {
  microvm: canRun ? microvmSupport('/nowhere', { probe: false }).problem : 'there are no sandboxes here',
  vm: fullVmProblem(),
};
for (const [backend, problem] of Object.entries(problems)) {
  if (canRun && problem !== undefined) console.log(`backend ${backend} is not tested: ${problem}`);
}
const THERE = ['container', 'fncall', 'microvm', 'vm'].filter((backend) => problems[backend] === undefined);
const python = canRun ? await pythonWithLibdsec() : undefined;
const rows = scenarios.flatMap((scenario) =>
  scenario.backends.filter((backend) => THERE.includes(backend)).map((backend) => ({ ...scenario, backend })),
);

describe.skipIf(!canRun)('one call, whatever the backend', { timeout: 600_000 }, () => {
  let world: World;
  let client: DSecClient;
  const images: Record<string, string> = { container: IMAGE, disk: 'echo:1' };

  beforeAll(async () => {
    world = await makeWorld();
    if (THERE.includes('vm')) {
      const script = join(root, 'scripts/echo-image.mjs');
      execFileSync(process.execPath, [script, '--image', images.disk!], { env: world.env, stdio: 'pipe' });
    }
    client = await new DSecClient({ url: world.url, token: world.token }).open();
  }, 400_000);
  afterAll(async () => {
    client?.close();
    await world?.close();
  }, 400_000);

  it.each(rows)('TypeScript, $backend: $name', async ({ backend, image, steps = [], raises }) => {
    const args = { image: images[image]!, memoryLimitMb: 192, cpuCoresLimit: 1 };
    if (raises !== undefined) {
      const error = await client.run(backend, args).catch((thrown: unknown) => thrown);
      expect(error).toBeInstanceOf(DSecError);
      check(errorView(error as DSecError), raises, backend);
      return;
    }
    const sandbox = await client.run(backend, args);
    try {
      const site: Site = { client, url: world.url, image: args.image, folder: world.folder, sandbox };
      for (const [at, step] of steps.entries()) await takeStep(site, step, `${backend}, step ${at + 1}: ${step.do}`);
    } finally {
      await sandbox.remove({ force: true });
    }
  });

  it.skipIf(python === undefined)('Python: the same', async () => {
    const env = {
      ...world.env,
      PYTHONDONTWRITEBYTECODE: '1',
      DSEC_TEST_IMAGE: IMAGE,
      DSEC_TEST_SCENARIOS: join(root, 'control/sdk/scenarios.json'),
      DSEC_TEST_BACKEND_SCENARIOS: file,
      DSEC_TEST_BACKEND_IMAGES: JSON.stringify(images),
      DSEC_TEST_BACKENDS: THERE.join(','),
    };
    const folder = join(world.folder, 'pytest');
    const tests = join(root, 'control/sdk/python/tests/test_backends.py');
    const args = ['-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--tb=short', '--basetemp', folder, tests];
    const { stdout } = await run(python!, args, { env, cwd: world.folder, maxBuffer: 64 << 20 }).catch(
      (error) => error as { stdout: string },
    );
    expect(stdout).toMatch(new RegExp(`\\n${rows.length} passed[^\\n]*\\n?$`));
  });
});
